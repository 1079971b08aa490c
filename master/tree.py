"""The stacks of all ranks as one tree, and which few of them are elsewhere than the many.

A call is (function, file, line), a stack a tuple of calls, innermost first, as a look has it. In the tree
they begin with the outermost. Calls are the same if file and function are; or, told so, if the line is
too: who is in the same collective as the others, but called from elsewhere, has left one out.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Call = tuple[str, str, int]
"""Function, file, line; a line of 0 is not known."""

DEEPEST = 256
"""Calls of a stack that the tree shows, from the outermost."""
_FEW = 3
"""Ranks are few where they are no more than one in so many of those at the split."""
_OURS = ("/elastic/agent/", "/agent/starters/", "/agent/boot.py", "<frozen runpy>", "/runpy.py")
"""Below a script, where ranks differ by how they were started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A call that ranks are in, and what they call from it."""

    call: Call
    """Of the root: ("", "", 0). A line of 0: ranks are on several."""
    ranks: tuple[int, ...]
    """Sorted."""
    calls: tuple["Node", ...] = ()
    """The one with the most ranks first."""

    @property
    def here(self) -> tuple[int, ...]:
        """Ranks whose stack ends here."""
        deeper = {rank for node in self.calls for rank in node.ranks}
        return tuple(rank for rank in self.ranks if rank not in deeper)


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Few ranks that are not where most are."""

    ranks: tuple[int, ...]
    call: Call
    """The innermost that all of them are in; of ranks without a stack ("", "", 0)."""


def merge(stacks: Mapping[int, Sequence[Call]], *, lines: bool = False) -> Node:
    """One tree of each rank's stack; lines: calls on different lines are different calls."""
    groups: dict[tuple[Call, ...], list[int]] = defaultdict(list)
    for rank, stack in stacks.items():
        groups[_script(stack)].append(rank)
    return _node(("", "", 0), list(groups.items()), 0, lines)


def _script(stack: Sequence[Call]) -> tuple[Call, ...]:
    """Outermost first, without what lies below the script."""
    calls = tuple(reversed(stack))
    below = 0
    while below < len(calls) and any(part in calls[below][1] for part in _OURS):
        below += 1
    return calls[below : below + DEEPEST]


_Group = tuple[tuple[Call, ...], list[int]]


def _node(call: Call, groups: list[_Group], depth: int, lines: bool) -> Node:
    branches: dict[tuple[str, str, int], list[_Group]] = defaultdict(list)
    for stack, ranks in groups:
        if len(stack) > depth:
            function, file, line = stack[depth]
            branches[bare(function), file, line if lines else 0].append((stack, ranks))
    nodes = [
        _node(_call([stack[depth] for stack, _ in branch]), branch, depth + 1, lines)
        for branch in branches.values()
    ]
    nodes.sort(key=lambda node: (-len(node.ranks), node.ranks))
    ranks = sorted(rank for _, ranks in groups for rank in ranks)
    return Node(call=call, ranks=tuple(ranks), calls=tuple(nodes))


def _call(calls: list[Call]) -> Call:
    """What stands for several: the longest name, for not every source knows the qualified one."""
    function = max((call[0] for call in calls), key=lambda name: (len(name), name))
    found = {call[2] for call in calls}
    return function, calls[0][1], found.pop() if len(found) == 1 else 0


def bare(function: str) -> str:
    """The last part of a qualified name."""
    return function.rpartition(".")[2]


def apart(tree: Node) -> tuple[Apart, ...]:
    """All few ranks that are apart from the rest at some split, the fewest first.

    A split is a call from which ranks go different ways, or end there. Never half of those or more.
    """
    found: list[Apart] = []
    open_nodes = [tree]
    while open_nodes:
        node = open_nodes.pop()
        ways: list[tuple[tuple[int, ...], Node]] = [(one.ranks, one) for one in node.calls]
        if here := node.here:
            ways.append((here, node))
        for ranks, way in ways:
            if _FEW * len(ranks) <= len(node.ranks):
                call = node.call if way is node else _innermost(way).call
                found.append(Apart(ranks=ranks, call=call))
            elif way is not node:
                open_nodes.append(way)
    return tuple(sorted(found, key=lambda one: (len(one.ranks), one.ranks)))


def odd(tree: Node) -> Apart | None:
    """The fewest that are apart; None where nobody is, and where several are as few."""
    found = apart(tree)
    if not found or (len(found) > 1 and len(found[1].ranks) == len(found[0].ranks)):
        return None
    return found[0]


def _innermost(node: Node) -> Node:
    """The deepest call that all of its ranks are in."""
    while len(node.calls) == 1 and node.calls[0].ranks == node.ranks:
        node = node.calls[0]
    return node


def render(tree: Node, *, most: int = 60) -> str:
    """The tree for people, in at most `most` lines. Calls that nobody leaves in another way stay on one
    level; of a long run of them the first and the last ones are shown."""
    lines: list[str] = []
    _render(tree, 0, lines)
    if len(lines) > most:
        lines[most - 1 :] = [f"... {len(lines) - most + 1} lines more"]
    return "\n".join(lines)


_RUN = 8
"""Calls in one run that are shown."""
_RANGES = 12
"""Of ranks, on one line."""


def _render(node: Node, level: int, lines: list[str]) -> None:
    run = [node]
    while len(run[-1].calls) == 1 and run[-1].calls[0].ranks == node.ranks:
        run.append(run[-1].calls[0])
    shown = [_words(one.call) for one in run if one.call[0]]
    if len(shown) > _RUN:
        left_out = len(shown) - _RUN + 1
        shown[2 : 2 + left_out] = [f"... {left_out} calls more"]
    indent = "  " * level
    for place, words in enumerate(shown or ["ranks"]):
        lines.append(f"{indent}{words}" + (f"  [{_who(node.ranks)}]" if place == 0 else ""))
    last = run[-1]
    if last.calls and last.here:
        lines.append(f"{indent}  (here)  [{_who(last.here)}]")
    for one in last.calls:
        _render(one, level + 1, lines)


def _words(call: Call) -> str:
    function, file, line = call
    place = f"{file}:{line}" if line else file
    return f"{function} ({place})" if place else function


def _who(ranks: tuple[int, ...]) -> str:
    """Ranks on one line: the first of many ranges, and how many ranks that are."""
    parts = ranges(ranks).split(",")
    if len(parts) <= _RANGES:
        return ",".join(parts)
    return f"{','.join(parts[:_RANGES])},... ({len(ranks)} ranks)"


def ranges(ranks: Collection[int]) -> str:
    """Ranks as people write them: 0-6,8."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
