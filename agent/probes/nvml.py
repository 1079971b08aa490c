"""What the driver counts and says of one GPU: NVML, and Xids in the kernel's log.

With `--steps` each line of standard input names what to say next: `nvml_use`, who is on the GPU, which is to be asked
before we are, or `nvml`, all else.
Everything is optional: what a GPU, a driver or our rights do not give is not among the figures.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from elastic.agent import kernel_log
from elastic.agent.probes import judge
from elastic.agent.probes.program import Fault, NotKnown, ask, begin, parser, tell


def measure(device: str) -> dict[str, float]:
    """device: NVML's index, or a UUID. Raises Fault, NotKnown."""
    nvml, handle = _reach(device)
    return _judged(_use(nvml, handle) | _counters(nvml, handle))


def do(step: str, device: str) -> dict[str, float]:
    """One step. Raises Fault, NotKnown."""
    nvml, handle = _reach(device)
    return _use(nvml, handle) if step == "nvml_use" else _judged(_counters(nvml, handle))


def _judged(figures: dict[str, float]) -> dict[str, float]:
    if what := judge.gpu(figures):
        raise Fault(what, figures)
    if not figures:
        raise NotKnown("NVML says nothing of it")
    return figures


def _reach(device: str) -> tuple[Any, Any]:
    """The binding, and its handle of the GPU."""
    try:
        import pynvml
    except ImportError as error:
        raise NotKnown(f"no pynvml: {error}") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NotKnown(f"NVML: {error}") from error
    try:
        if device.isdecimal():
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(device))
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(device)
    except pynvml.NVMLError as error:
        if (handle := _by_beginning(pynvml, device)) is not None:
            return pynvml, handle
        raise Fault(f"NVML cannot reach it: {error}") from error


def _by_beginning(nvml: Any, uuid: str) -> Any:
    """CUDA takes a UUID's beginning, too, if no other GPU's begins so. None: there is no such GPU."""
    if not uuid.startswith("GPU-"):
        return None
    try:
        every = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
        found = [one for one in every if nvml.nvmlDeviceGetUUID(one).startswith(uuid)]
    except nvml.NVMLError:
        return None
    return found[0] if len(found) == 1 else None


class _Found:
    """Answers to those questions that have one."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.figures: dict[str, float] = {}

    def take(self, name: str, question: Callable[[], Any]) -> None:
        # Not supported, not permitted, or a binding or driver that is too old.
        with contextlib.suppress(
            self._nvml.NVMLError, AttributeError, TypeError, ValueError, LookupError
        ):
            self.figures[name] = float(question())


def _use(nvml: Any, handle: Any) -> dict[str, float]:
    found = _Found(nvml)
    found.take("memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
    found.take("memory_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
    found.take("others", lambda: _others(nvml, handle))
    return found.figures


def _counters(nvml: Any, handle: Any) -> dict[str, float]:
    found = _Found(nvml)
    take, figures = found.take, found.figures

    def ecc(kind: int) -> Any:
        return nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, kind
        )

    take("ecc_uncorrected", lambda: ecc(nvml.NVML_VOLATILE_ECC))
    take("ecc_uncorrected_ever", lambda: ecc(nvml.NVML_AGGREGATE_ECC))
    take("remap_pending", lambda: nvml.nvmlDeviceGetRemappedRows(handle)[2])
    take("remap_failed", lambda: nvml.nvmlDeviceGetRemappedRows(handle)[3])
    take("recovery_action", lambda: _field(nvml, handle, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION))
    take("clock_event_reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if "clock_event_reasons" not in figures:  # before driver 535
        take("clock_event_reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    take("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    figures.update(_links(nvml, handle))
    figures.update(_xid(nvml, handle))
    return figures


def _field(nvml: Any, handle: Any, field: int) -> int:
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
    if value.nvmlReturn != 0:
        raise LookupError(field)
    return int(value.value.uiVal)


def _others(nvml: Any, handle: Any) -> int:
    """Processes that compute on it; we do not."""
    return len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _links(nvml: Any, handle: Any) -> dict[str, float]:
    active, switched, errors, counted = 0, False, 0, False
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            break  # there are no more
        with contextlib.suppress(nvml.NVMLError, AttributeError):  # of an old binding
            far = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            switched |= far == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        for kind in (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY):
            with contextlib.suppress(nvml.NVMLError):
                errors += nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, kind)
                counted = True
    else:
        link += 1
    found = {"nvlinks_active": float(active), "nvlinks_switched": float(switched)} if link else {}
    return {**found, "nvlink_errors": float(errors)} if counted else found


def _xid(nvml: Any, handle: Any) -> dict[str, float]:
    """The newest hardware Xid in the kernel's log, where we may read that; 0: it has none."""
    with contextlib.suppress(nvml.NVMLError, OSError, ValueError, AttributeError):
        bus = nvml.nvmlDeviceGetPciInfo(handle).busId
        bus = bus.decode() if isinstance(bus, bytes) else bus
        xid = judge.last_xid(_all_records(), bus, time.clock_gettime(time.CLOCK_BOOTTIME))
        return {"xid": float(xid[0]), "xid_age_s": xid[1]} if xid else {"xid": 0.0}
    return {}


def _all_records() -> str:
    """That the kernel still has. Raises OSError."""
    fd = kernel_log.open_log()
    try:
        return "".join(kernel_log.records(fd))
    finally:
        os.close(fd)


def main(argv: list[str]) -> None:
    arguments = parser("nvml", __doc__)
    arguments.add_argument("device", help="index or UUID")
    arguments.add_argument("--steps", action="store_true", help="that standard input names")
    args = arguments.parse_args(argv)
    answers = begin(args.parent)
    if not args.steps:
        tell(answers, ask("nvml", lambda: measure(args.device)))
        return
    with contextlib.suppress(ImportError):
        import pynvml  # noqa: F401 - ahead of the first step, which says so where it is not there
    for line in sys.stdin:
        step = line.strip()
        tell(answers, ask(step, partial(do, step, args.device)))


if __name__ == "__main__":
    main(sys.argv[1:])
