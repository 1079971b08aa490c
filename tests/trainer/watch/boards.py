"""What TensorBoard shows of a folder."""

from pathlib import Path

from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(point.step, point.value) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    found = plugin_event_accumulator.EventAccumulator(str(folder))  # the other takes back no texts
    found.Reload()
    ending = "/text_summary"
    return {
        tag.removesuffix(ending): [
            (one.step, one.tensor_proto.string_val[0].decode()) for one in found.Tensors(tag)
        ]
        for tag in found.Tags()["tensors"]
        if tag.endswith(ending)
    }
