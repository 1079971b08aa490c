"""What a rank does, by its stack. Pure."""

from enum import StrEnum


class Activity(StrEnum):
    COLLECTIVE = "collective"
    P2P = "p2p"
    DATA = "data"
    COMPILE = "compile"
    CHECKPOINT = "checkpoint"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    NATIVE = "native"
    PYTHON = "python"
    STOPPED = "stopped"
    GONE = "gone"


def activity(frames: tuple[tuple[str, str, int], ...], state: str) -> tuple[Activity, str]:
    if state in ("T", "t"):
        return Activity.STOPPED, "stopped"
    for function, file, _ in frames:
        name = function.rpartition(".")[2]
        if "distributed_c10d" in file or "_functional_collectives" in file:
            return Activity.COLLECTIVE, name
        if file.endswith("utils/data/dataloader.py"):
            return Activity.DATA, name
        if "torch/_dynamo" in file or "torch/_inductor" in file:
            return Activity.COMPILE, name
        if "elastic/checkpoint" in file:
            return Activity.CHECKPOINT, name
    return Activity.PYTHON, frames[0][0] if frames else "?"
