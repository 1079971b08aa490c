"""When counters and figures are a fault. Pure; what is not among the figures is not known, and no fault.

NVIDIA's "GPU Memory Error Management" says of the recovery action: with none, the GPU can be used
again at once, and so it has the last word on ECC errors, row remapping and Xids where the driver has it
(570 and newer). Xids: those whose immediate action in NVIDIA's Xid catalog is more than to start the
application again.
"""

from collections.abc import Mapping

from elastic.proto import xids

HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140, 143})
"""Double bit error, halt of a micro-controller, failed row remap, NVLink, off the bus, uncontained
memory error, GSP time-out and error, unrecovered ECC error, GPU initialisation."""
XID_AGE = 3600.0
"""Seconds; what was older has been dealt with, or shows by itself."""
SLOWDOWNS = {0x08: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
"""Bits of NVML's clock event reasons that no load of ours may cause."""
ACTIONS = {
    1: "a reset of the GPU", 2: "a reboot of the node", 3: "a drain of its peer-to-peer traffic",
    4: "a drain and a reset", 5: "a recovery of its IMEX domain", 6: "a reset of the bus",
    7: "a reboot of the system",
}  # fmt: skip
"""NVML's recovery actions."""

LEAST_MEMORY = 256 << 20
"""Bytes; with less left the next allocation ends somebody."""
MOST_STALLED = 50.0
"""Percent of the last ten seconds in which nobody ran, all waiting for memory."""


def gpu(figures: Mapping[str, float]) -> str:
    """What NVML's figures of one GPU say is wrong with it; empty: nothing."""
    found = []
    if action := figures.get("recovery_action", 0):
        found.append(f"the driver asks for {ACTIONS.get(int(action), f'action {action:.0f}')}")
    if figures.get("remap_failed", 0):
        found.append("a memory row could not be remapped")
    if "recovery_action" not in figures:
        if errors := figures.get("ecc_uncorrected", 0):
            found.append(f"{errors:.0f} uncorrected ECC errors since the driver was loaded")
        if figures.get("remap_pending", 0):
            found.append("a memory row waits for a reset to be remapped")
    reasons = int(figures.get("clock_event_reasons", 0))
    found += [
        f"its clocks are held down by {name}" for bit, name in SLOWDOWNS.items() if reasons & bit
    ]
    dealt_with = "recovery_action" in figures and not action  # as by a reset since then
    recent = figures.get("xid_age_s", 0.0) <= XID_AGE
    if (xid := figures.get("xid", 0)) and recent and not dealt_with:
        found.append(f"Xid {xid:.0f} in the kernel log {figures.get('xid_age_s', 0.0):.0f} s ago")
    return "; ".join(found)


def memory(figures: Mapping[str, float]) -> str:
    """What a node's memory figures say is wrong; empty: nothing."""
    found = []
    for name, words in (("free_bytes", "the machine"), ("cgroup_free_bytes", "our cgroup")):
        left = figures.get(name)
        if left is not None and left < LEAST_MEMORY:
            found.append(f"{words} has {left / (1 << 20):.0f} MiB of memory left")
    for name, words in (
        ("stalled_percent", "the machine"),
        ("cgroup_stalled_percent", "our cgroup"),
    ):
        if (stalled := figures.get(name, 0.0)) > MOST_STALLED:
            found.append(f"all of {words} waited for memory in {stalled:.0f} % of the last 10 s")
    return "; ".join(found)


def last_xid(log: str, bus: str, uptime: float) -> tuple[int, float] | None:
    """The newest hardware Xid of the GPU at PCI address `bus`, and its age in seconds.

    log: records of /dev/kmsg, `level,sequence,microseconds since boot,...;text`. bus: as NVML writes
    it, `00000000:3B:00.0`; the log leaves out the function and half of the domain.
    """
    found = None
    for record in log.splitlines():
        xid = xids.find(record)
        if xid and xid.number in HARDWARE_XIDS and _bus(xid.bus) == _bus(bus):
            since = record.split(";", 1)[0].split(",")
            age = uptime - int(since[2]) / 1e6 if len(since) > 2 and since[2].isdecimal() else 0.0
            found = (xid.number, max(0.0, age))
    return found


def _bus(address: str) -> tuple[int, int, int]:
    """Domain, bus and device."""
    domain, bus, device = address.partition(".")[0].split(":")
    return int(domain, 16), int(bus, 16), int(device, 16)
