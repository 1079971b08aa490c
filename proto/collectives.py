"""What makes two ranks' collectives the same, for whoever records them and for whoever compares. Pure."""

_UNEVEN = ("all_to_all", "alltoall", "scatter")
"""Of which ranks may give inputs of other sizes, or none."""


def kind(op: str, sizes: str) -> str:
    """What ranks are to have alike under one number of their group. op: as torch names it, "nccl:all_reduce"; sizes: of
    its inputs."""
    return op if op.rpartition(":")[2].startswith(_UNEVEN) else f"{op} {sizes}"
