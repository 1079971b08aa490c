"""Who stands apart among ranks that all wait: by the collectives that they have issued, and what they have sent to one another.
Pure."""

from collections import Counter
from collections.abc import Hashable, Mapping
from itertools import islice

from elastic.master.circles import Waits, circles
from elastic.master.seen import Collective, Seen

Owed = Mapping[int, Mapping[int, str]]
"""By a rank that waits for a send or a receive, who has not done its part yet; and that in words."""


def _pending(last: Mapping[int, Seen]) -> list[dict[int, Collective]]:
    """By process group, by rank."""
    groups: dict[str, dict[int, Collective]] = {}
    for rank, seen in last.items():
        for one in (o for o in seen.pending if o.known and not o.p2p):
            groups.setdefault(one.group, {})[rank] = one
    return list(groups.values())


def odd(last: Mapping[int, Seen], *, ignoring: bool) -> list[Seen]:
    """The few whose collective of a number is another than that of the many in the same group; all of them, where
    none are many. Stages of a pipeline wait in groups of their own. ignoring: ranks that did not tell what they have
    issued; else nobody is named of whom they could say otherwise."""
    unsaid = sum(
        one.collectives is None or not all(o.known for o in one.pending) for one in last.values()
    )
    silent = 0 if ignoring else unsaid
    for pending in _pending(last):
        kinds = _of_one_number(pending)
        counts = Counter(kinds.values())
        if len(counts) > 1:
            (many, count), (_, second) = counts.most_common(2)
            few = [rank for rank, kind in kinds.items() if kind != many]
            if count > second + silent or not silent:
                return [last[rank] for rank in (few if count > second else kinds)]
    return []


def _of_one_number(pending: Mapping[int, Collective]) -> dict[int, str]:
    """By rank, what it has under the number that is to end first. Who is one further, as the root of a broadcast, had it
    before; of who is further still that is not known."""
    first = min(one.seq for one in pending.values())
    found = {
        rank: one.kind if one.seq == first else one.before if one.seq == first + 1 else ""
        for rank, one in pending.items()
    }
    return {rank: kind for rank, kind in found.items() if kind}


def owed(last: Mapping[int, Seen], *, ignoring: bool) -> Owed:
    """Who has a collective that is not over may wait in that, and is owed nothing. ignoring: ranks that did not tell;
    else nothing is said where there are any."""
    if not ignoring and any(one.transfers is None for one in last.values()):
        return {}
    owed: dict[int, dict[int, str]] = {}
    for rank, seen in last.items():
        if seen.collectives is None or not all(one.p2p for one in seen.pending):
            continue
        for peer, (sent, received) in (seen.transfers or {}).items():
            its = last[peer].transfers if peer in last else None
            if its is None:
                continue
            back, taken = its.get(rank, (0, 0))
            if received > back:
                words = f"rank {rank} receives number {received} from rank {peer}, which has sent {back}"
            elif sent > taken:
                words = (
                    f"rank {rank} sends number {sent} to rank {peer}, which has received {taken}"
                )
            else:
                continue
            owed.setdefault(rank, {})[peer] = words
    return owed


def owing(owed: Owed, last: Mapping[int, Seen]) -> set[int]:
    """Ranks that wait for one another in a circle, or between two; of these who went on to a collective without its
    part of a transfer, where somebody did. Where there is no circle, messages or a collective may be on their way."""
    if not owed:
        return set()
    circle = last.keys() & circles(_waits(owed, last))
    return circle - owed.keys() or circle


def crossed(last: Mapping[int, Seen]) -> Owed:
    """Ranks that wait for one another in a circle, each in a collective that those after it have not come to, since they
    wait in one of another group. Who has more than one that is not over may wait in either, and is not among them."""
    at: dict[tuple[str, int], list[int]] = {}
    rows: dict[tuple[str, int], range] = {}
    for rank, seen in last.items():
        if len(seen.pending) == 1 and (one := seen.pending[0]).known and not one.p2p:
            at.setdefault((one.group, one.seq), []).append(rank)
            rows[one.group, one.seq] = one.members
    if len({group for group, _ in at}) < 2:
        return {}
    waiters = {rank for ranks in at.values() for rank in ranks}
    waits: dict[Hashable, set[Hashable]] = {rank: set() for rank in waiters}
    for (group, seq), ranks in at.items():
        row, there = rows[group, seq], set(ranks)
        absent = (rank for rank in row if rank in waiters and rank not in there)
        waits[group, seq] = {rank for rank in absent if not _came(last[rank], group, seq)}
        for rank in ranks:
            waits[rank] = {(group, seq)}
    circle = circles(waits)
    found: dict[int, dict[int, str]] = {}
    for (group, seq), ranks in at.items():
        held_up_by = waits[group, seq] & circle
        for peer in islice((rank for rank in rows[group, seq] if rank in held_up_by), 1):
            for rank in (rank for rank in ranks if rank in circle):
                words = f"rank {rank} is in group {group}, to which rank {peer} has not come"
                found[rank] = {peer: words}
    return found


def _came(seen: Seen, group: str, seq: int) -> bool:
    issued = (one.seq for one in seen.collectives or () if one.group == group and not one.p2p)
    return max(issued, default=0) >= seq


def _waits(owed: Owed, last: Mapping[int, Seen]) -> Waits:
    """Of ranks, and of numbers of collectives in their group, each of which waits for those that are at it and
    for the number before: thousands of ranks may wait for thousands."""
    waits: dict[Hashable, set[Hashable]] = {rank: {*owed.get(rank, ())} for rank in last}
    groups: dict[str, dict[int, dict[int, bool]]] = {}
    for rank, seen in last.items():
        for one in (o for o in seen.collectives or () if o.known and not o.p2p):
            groups.setdefault(one.group, {}).setdefault(one.seq, {})[rank] = one.done
    for group, numbers in groups.items():
        before: set[Hashable] = set()
        for seq, ranks in sorted(numbers.items()):
            for rank in (r for r, done in ranks.items() if not done):
                waits[rank] |= before
            waits[group, seq] = before | ranks.keys()
            before = {(group, seq)}
    return waits


def not_begun(last: Mapping[int, Seen]) -> list[Seen]:
    """Those on whose device nothing of the collectives has begun, while the same one runs on others': another
    kernel of theirs does not end."""
    for pending in _pending(last):
        late = [rank for rank in pending if not any(o.started for o in last[rank].pending)]
        if 0 < len(late) < len(pending):
            return [last[rank] for rank in late]
    return []
