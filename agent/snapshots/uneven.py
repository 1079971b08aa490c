"""Whether ranks of a node hold the same of what they have divided among their images. Pure.

A rank writes a share of what it believes others of its node to hold as well. Where one of them does not,
nobody may have written it: such a moment has holes, and is never whole.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from elastic.proto.moment import Moment
from elastic.proto.slot import Belief, Snapshot

Shared = Mapping[tuple[int, ...], Mapping[str, str]]
"""What an image's header says of that: by the ranks that hold it in common, names and digests."""

FEW = 3
"""Names in a sentence."""
LONGEST = 1000
"""Characters of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank has of a moment, in a slot or on storage."""

    moment: Moment
    rank: int
    node: range
    """The ranks of its node."""
    beliefs: Collection[Belief]
    image: memoryview | None = None
    """None: on storage alone."""


def share(found: Snapshot) -> Share:
    stamp = found.stamp
    return Share(
        moment=found.moment, rank=stamp.rank, node=stamp.node, beliefs=found.beliefs,
        image=found.image,
    )  # fmt: skip


def uneven(images: Mapping[int, Collection[Belief]]) -> bool:
    """Whether somebody's belief is not everybody's whom it is about.

    images: what is believed in each rank's image of one moment, of all ranks of a node.
    """
    believers = Counter(belief for beliefs in images.values() for belief in set(beliefs))
    return any(count != belief.ranks for belief, count in believers.items())


def torn(found: Iterable[Share]) -> dict[Moment, dict[int, Share]]:
    """The moments of which all shares of a node are there and its ranks do not hold the same of what they
    have divided; with those shares, by rank."""
    nodes: dict[tuple[Moment, range], dict[int, Share]] = {}
    for one in found:
        nodes.setdefault((one.moment, one.node), {})[one.rank] = one
    return {
        at: shares
        for (at, node), shares in nodes.items()
        if len(shares) == len(node) and uneven({rank: s.beliefs for rank, s in shares.items()})
    }


def reason(images: Mapping[int, Shared]) -> str:
    """What differs between which ranks, as a sentence without its end."""
    names: list[str] = []
    ranks: set[int] = set()
    for group in {group for shared in images.values() for group in shared}:
        members = [rank for rank in group if rank in images]
        said = [images[rank].get(group, {}) for rank in members]
        found = [
            name
            for name in {name for one in said for name in one}
            if len({one.get(name) for one in said}) > 1
        ]
        names += found
        ranks |= set(members if found else ())
    who = ", ".join(str(rank) for rank in sorted(ranks or images))
    few = ", ".join(sorted(names)[:FEW])[:LONGEST] or "what they keep equal"
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"ranks {who} do not hold the same of {few}{more}"


def shared(image: memoryview | None) -> Shared:
    """What an image says there; nothing where it is no image (`elastic/checkpoint/state/image.py`)."""
    if image is None:
        return {}
    try:
        length = int.from_bytes(image[:8], "little")
        header = json.loads(bytes(image[8 : 8 + length]))
        fields = json.loads(header["__metadata__"]["elastic"])
        return {tuple(ranks): dict(names) for ranks, names in fields.get("shared", ())}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
