"""Who predicts more than the next token: nobody. Scripts ask all the same, whatever their arguments."""

from collections.abc import Sequence

from elastic.trainer.megatron import absent

__getattr__ = absent.attributes(__name__)


def mtp_on_this_rank(
    config: object, ignore_virtual: bool | None = True, vp_stage: int | None = None
) -> bool:
    return False


def get_mtp_ranks(pp_ranks: Sequence[int], config: object) -> list[int]:
    return []
