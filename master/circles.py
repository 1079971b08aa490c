"""Who waits for one another, where many wait for many: linear in the graph's size. Pure."""

from collections.abc import Collection, Hashable, Mapping

Waits = Mapping[Hashable, Collection[Hashable]]
"""A graph: for whom each waits."""


def circles(waits: Waits) -> set[Hashable]:
    """What is in a circle, or between two of them. All that is waited for waits, if for nobody, in `waits`."""
    return {*_trimmed(_turned(_trimmed(waits)))}


def _turned(waits: Waits) -> Waits:
    """By whom each is waited for."""
    turned: dict[Hashable, list[Hashable]] = {one: [] for one in waits}
    for one, others in waits.items():
        for other in others:
            turned[other].append(one)
    return turned


def _trimmed(waits: Waits) -> Waits:
    """Without whoever waits for nobody, again and again: what is left waits for a circle, or is in one."""
    turned, left = _turned(waits), {one: len(others) for one, others in waits.items()}
    over = [one for one, count in left.items() if not count]
    gone = set(over)
    while over:
        for one in turned[over.pop()]:
            left[one] -= 1
            if not left[one]:
                gone.add(one)
                over.append(one)
    kept = (one for one in waits if one not in gone)
    return {one: [other for other in waits[one] if other not in gone] for one in kept}
