"""What the driver counts and says of one GPU: NVML, and Xids in the kernel's log.

Everything is optional: what a GPU, a driver or our rights do not give is not among the figures.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from elastic.agent import kernel_log
from elastic.agent.probes import judge
from elastic.agent.probes.program import Fault, NotKnown, ask, begin, parser, tell


def measure(device: str) -> dict[str, float]:
    """device: NVML's index, or a UUID. Raises Fault, NotKnown."""
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
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(device))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(device)
    except pynvml.NVMLError as error:
        raise Fault(f"NVML cannot reach it: {error}") from error
    figures = _figures(pynvml, handle)
    if what := judge.gpu(figures):
        raise Fault(what, figures)
    if not figures:
        raise NotKnown("NVML says nothing of it")
    return figures


def _figures(nvml: Any, handle: Any) -> dict[str, float]:
    found: dict[str, float] = {}

    def take(name: str, question: Callable[[], Any]) -> None:
        # Not supported, not permitted, or a binding or driver that is too old.
        with contextlib.suppress(
            nvml.NVMLError, AttributeError, TypeError, ValueError, LookupError
        ):
            found[name] = float(question())

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
    if "clock_event_reasons" not in found:  # before driver 535
        take("clock_event_reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    take("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    take("memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
    take("memory_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
    take("others", lambda: _others(nvml, handle))
    found.update(_links(nvml, handle))
    found.update(_xid(nvml, handle))
    return found


def _field(nvml: Any, handle: Any, field: int) -> int:
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
    if value.nvmlReturn != 0:
        raise LookupError(field)
    return int(value.value.uiVal)


def _others(nvml: Any, handle: Any) -> int:
    """Processes that compute on it; we do not."""
    return len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _links(nvml: Any, handle: Any) -> dict[str, float]:
    active, errors, counted = 0, 0, False
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            break  # there are no more
        for kind in (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY):
            with contextlib.suppress(nvml.NVMLError):
                errors += nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, kind)
                counted = True
    else:
        link += 1
    found = {"nvlinks_active": float(active)} if link else {}
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
    args = arguments.parse_args(argv)
    tell(begin(args.parent), ask("nvml", lambda: measure(args.device)))


if __name__ == "__main__":
    main(sys.argv[1:])
