"""What TensorBoard shows of a folder."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(point.step, point.value) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }
