"""What the end of a job, or of a node's part in it, is called outside (`proto/ending.py`)."""

from collections.abc import Mapping

from elastic.master.recovery import Cause
from elastic.master.state import DRAINED, Why
from elastic.proto.ending import Ended

KINDS: Mapping[str, Ended] = {
    Cause.ERROR: Ended.USER_ERROR,
    Cause.CRASH: Ended.USER_ERROR,
    Cause.UNIT: Ended.USER_ERROR,
    Cause.DEVICE_OOM: Ended.OOM,
    Cause.KERNEL_OOM: Ended.OOM,
    Cause.HARDWARE: Ended.HARDWARE,
    Cause.HANG: Ended.HANG,
    Cause.KILLED: Ended.FAULTS,
    Cause.NETWORK: Ended.FAULTS,
    Cause.UNEVEN: Ended.USER_ERROR,
    Cause.NO_START: Ended.FAULTS,
    Cause.NO_LOG: Ended.FAULTS,
    Cause.NODE_LOST: Ended.FAULTS,
    Cause.NODE_LEFT: Ended.FAULTS,
    Cause.AGENT_LOST: Ended.FAULTS,
    Cause.STORE_LOST: Ended.FAULTS,
    Cause.DAMAGED: Ended.FAULTS,
    Why.JOIN_TIMEOUT: Ended.RENDEZVOUS_TIMEOUT,
    Why.BELOW_MIN: Ended.BELOW_MIN,
    Why.UNHEALTHY: Ended.UNHEALTHY,
    Why.STRAGGLER: Ended.STRAGGLER,
    Why.STOPPED: Ended.STOPPED,
    Why.UNSCHEDULABLE: Ended.UNSCHEDULABLE,
    Why.QUOTA: Ended.QUOTA,
    Why.IMAGE: Ended.IMAGE,
    Why.DEADLINE: Ended.DEADLINE,
}
"""By what a job failed of, or a node is drained for."""


def kind_of(exit_code: int, cause: str) -> Ended:
    """exit_code: torchrun's, or `DRAINED`."""
    if exit_code == 0:
        return Ended.FINISHED
    if cause in KINDS:
        return KINDS[cause]
    return Ended.DRAINED if exit_code == DRAINED else Ended.USER_ERROR
