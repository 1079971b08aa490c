"""Whether it is a rank's GPU that is slow or its host, and how far GPUs are apart where nobody waits for one. Pure.

A slow device takes longer for a backward pass, too, while its host is ahead of it; else it waits for its host: for data,
or between kernels all the time. Devices that wait for others have power to spare and become faster by some per cent,
which makes a rank look slow in all that it does, and widens the spread: so it is compared with what it was before rather
than with them, where that is the smaller step, and the spread is that of before for whom then a device makes slow.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from statistics import median_low
from typing import Literal, NamedTuple

from elastic.master import robust
from elastic.master.intervals import Times

Part = Literal["", "device", "host"]


class Usual(NamedTuple):
    """What a rank on a device is compared with, in seconds a step."""

    compute: float
    backward: float
    """Of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What is remembered of ranks on GPUs."""

    of_host: Mapping[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    """By rank, whether what it was behind by was its host's (1) or its device's (0), newest last; NaN: not known, or not
    behind."""
    before: tuple[Mapping[int, Times], ...] = ()
    """What ranks took in the last two intervals in which nobody was behind: in the second somebody may have begun to be."""
    calm: tuple[float, ...] = ()
    """How far they were apart in such intervals, as a deviation, newest last."""


def taken_in(
    devices: Devices, times: Mapping[int, Times], peers: Iterable[Sequence[int]], least: float
) -> Devices:
    """With an interval's ranks that are behind. peers: ranks that are compared; least: the part by which who is behind is."""
    found: dict[int, float] = {}
    for ranks in peers:
        known = [rank for rank in ranks if isfinite(times[rank].backward)]
        if not known:
            continue
        theirs = Usual(
            median_low([times[rank].compute for rank in known]),
            median_low([times[rank].backward for rank in known]),
        )
        for rank in known:
            now = times[rank]
            if _longer(now.compute, theirs.compute, least):
                own = devices.before[0].get(rank) if devices.before else None
                usual = [theirs] if own is None else [theirs, Usual(own.compute, own.backward)]
                found[rank] = is_host(now, usual, least)
    windows = {
        rank: (*devices.of_host.get(rank, ()), found.get(rank, nan))[-robust.WINDOW :]
        for rank in devices.of_host.keys() | found.keys()
    }
    return replace(devices, of_host=windows)


def _longer(now: float, than: float, least: float) -> bool:
    """By half of that part."""
    return now - than > least / 2 * than


def is_host(now: Times, usual: Sequence[Usual], least: float) -> float:
    """Whether it is its host for which a rank is behind (1), or its device (0); NaN: nobody's backward pass is seen.
    usual: what its peers take, than whom it takes longer, and what it took before, if that is known; least: the part by
    which who is behind is."""
    if not usual[0].backward:
        return nan
    if now.starved:
        return 1.0
    shorter = [one for one in usual if _longer(now.compute, one.compute, least)]
    nearest = max(shorter, key=lambda one: one.compute)
    # A device that is slow is so in all that it does; data that come late make the forward pass longer.
    more = now.compute / nearest.compute - 1
    return float(now.backward < nearest.backward * (1 + more / 2))


def part(devices: Devices, ranks: Iterable[int]) -> Part:
    """What most intervals say of them."""
    found = [one for rank in ranks for one in robust.known(devices.of_host.get(rank, ()))]
    if not found:
        return ""
    return "host" if median_low(found) else "device"


def calmed(devices: Devices, times: Mapping[int, Times], spread: float) -> Devices:
    """With an interval in which nobody is behind. spread: how far ranks are apart, as a deviation."""
    if not all(isfinite(one.backward) for one in times.values()):
        return devices
    return replace(
        devices,
        before=(*devices.before, times)[-2:],
        calm=(*devices.calm, spread)[-robust.WINDOW :],
    )


def spread_by_themselves(
    devices: Devices, times: Mapping[int, Times], spread: float, least: float
) -> float:
    """Where somebody is behind, how far devices would be apart if some had not become faster: those wait for a slow one,
    and have power to spare, each as much as it has. Else `spread`, which is how far they are apart."""
    if len(devices.calm) < robust.LEAST:
        return spread
    first, last = devices.before
    faster = any(
        rank in first
        and rank in last
        and now.compute * (1 + least) < min(first[rank].compute, last[rank].compute)
        for rank, now in times.items()
    )
    return min(spread, max(devices.calm)) if faster else spread
