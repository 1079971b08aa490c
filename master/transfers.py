"""Whether what ranks send one another takes longer than it did, and over which link. Pure.

Of a group's ranks the one that comes last waits for nobody, so the least that any of them waits in a step is what their
transfers take. That is compared with what they took before. A link is named where groups share no more than it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from statistics import median_low

from elastic.master import robust

_SLOWLY = 1 / 64
"""Part by which what is usual follows what is now."""
_FEW_NODES = 64
"""Among which a link is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Of ranks that communicate with one another."""

    window: tuple[float, ...] = ()
    """Seconds a step that transfers took, newest last; NaN: not known."""
    usual: float = nan
    """What they take; NaN: not known yet."""
    noise: float = 0.0
    """The largest deviation from that yet."""
    slow: int = 0
    """Intervals since they take longer; 0: they do not."""

    @property
    def longer(self) -> float:
        """Seconds a step by which they take longer now."""
        return median_low(robust.known(self.window)) - self.usual


def taken_in(group: Group, seconds: float, *, least: float, deviations: float) -> Group:
    """With an interval's transfers. least: seconds by which slow ones are longer; deviations: and how many."""
    group = replace(group, window=(*group.window, seconds)[-robust.WINDOW :])
    known = robust.known(group.window)
    if len(known) < robust.LEAST:
        return replace(group, slow=0)
    if not isfinite(group.usual):
        group = replace(group, usual=median_low(known))
    # Of the older half where that is less: one level becoming another over some intervals is no noise.
    moves = min(robust.jitter(known), robust.jitter(known[: robust.WINDOW // 2 + 1]))
    noise = max(group.noise, moves) if not group.slow else group.noise
    bound = max(least, deviations * noise)
    if group.longer > (robust.STAYS * bound if group.slow else bound):
        above = [one - group.usual > bound / 2 for one in group.window]
        return replace(group, slow=group.slow + 1 if group.slow else robust.age(above))
    usual = group.usual + _SLOWLY * group.longer
    return replace(group, usual=usual, noise=noise, slow=0)


def ends(nodes: Mapping[str, set[str]], groups: Mapping[str, Group]) -> list[str]:
    """The two ends of the link that all slow groups have and no other has, or the one node that they share; none where
    it may be several. nodes: of each group."""
    slow = [nodes[name] for name, group in groups.items() if group.slow]
    fine = [nodes[name] for name, group in groups.items() if not group.slow]
    common: Sequence[str] = sorted(set.intersection(*slow)) if slow else ()
    if len(common) == 1:
        return [*common]
    pairs = [
        [one, other]
        for one in common
        for other in common
        if one < other and not any({one, other} <= group for group in fine)
    ] if len(common) <= _FEW_NODES else []  # fmt: skip
    return pairs[0] if len(pairs) == 1 else []
