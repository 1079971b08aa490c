"""Who writes what of a node's state: all of it, once, evenly; and units that tell what is the same."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.state import share
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.state.image import Layout, Piece
from elastic.checkpoint.state.tensors import Part
from elastic.proto.slot import MOST_UNITS
from elastic.proto.sums import Chunk


def part(name: str, size: int, holders: tuple[int, ...]) -> Part:
    piece = Piece(name=name, dtype="uint8", shape=(size,), offset=(0,), extent=(size,))
    return Part(piece=piece, tensor=torch.empty(size, dtype=torch.uint8), holders=holders)


def place(rank: int, ranks_a_node: int, world_size: int) -> Place:
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=rank % ranks_a_node,
        local_world_size=ranks_a_node,
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, list[Part]]:
    """Ranks of a node, of the world, and all parts that there are."""
    ranks_a_node = draw(st.integers(1, 4))
    world = ranks_a_node * draw(st.integers(1, 3))
    holders = st.sets(st.integers(0, world - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    groups = draw(st.lists(holders, min_size=1, max_size=3))
    sizes = draw(st.lists(st.tuples(st.sampled_from(groups), st.integers(0, 9)), max_size=12))
    return ranks_a_node, world, [part(f"{n}", size, who) for n, (who, size) in enumerate(sizes)]


def mine(parts: list[Part], here: Place) -> list[Part]:
    return share.mine(share.groups(parts, here), here.rank)


def names(parts: list[Part]) -> set[str]:
    return {part.piece.name for part in parts}


@given(jobs(), st.randoms())
def test_each_node_saves_all_that_its_ranks_hold_and_each_part_once(
    job: tuple[int, int, list[Part]], chance: st.DataObject
) -> None:
    ranks_a_node, world, parts = job
    for first in range(0, world, ranks_a_node):
        node = range(first, first + ranks_a_node)
        saved: list[str] = []
        for rank in node:
            held = [p for p in parts if rank in p.holders]
            chance.shuffle(held)  # type: ignore[attr-defined]
            mine_ = names(mine(held, place(rank, ranks_a_node, world)))
            assert mine_ <= names(held)
            saved += mine_
        assert sorted(saved) == sorted(names([p for p in parts if set(p.holders) & set(node)]))


@given(st.integers(1, 4), st.lists(st.integers(0, 50), max_size=12))
def test_shares_differ_by_the_largest_part_at_most(ranks: int, sizes: list[int]) -> None:
    parts = [part(f"{n}", size, tuple(range(ranks))) for n, size in enumerate(sizes)]
    loads = [
        sum(p.piece.nbytes for p in mine(parts, place(rank, ranks, ranks))) for rank in range(ranks)
    ]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_what_is_held_by_another_node_too_is_saved_by_both() -> None:
    parts = [part("w", 4, (1, 2))]
    assert [names(mine(parts, place(rank, 2, 4))) for rank in range(4)] == [
        set(),
        {"w"},
        {"w"},
        set(),
    ]


def test_what_nobody_holds_is_saved_by_nobody() -> None:
    assert mine([part("w", 4, ())], Place()) == []


# --- units ---------------------------------------------------------------------------------------


def made(
    tensors: dict[str, torch.Tensor], values: bytes = b"{}", ties: dict[str, str] | None = None
) -> tuple[Layout, list[Chunk]]:
    pieces = [
        Piece(name=n, dtype="float32", shape=tuple(t.shape), offset=(0,), extent=tuple(t.shape))
        for n, t in tensors.items()
    ]
    layout = Layout(pieces, ties or {})
    image = layout.image(len(values))
    return layout, copy_cpu.write(image, tensors, values, memoryview(bytearray(image.nbytes)))


HOLDERS = {"own": (0,), "shared": (0, 1), "empty": (0,)}


def units_of(
    own: float = 1, shared: float = 1, values: bytes = b"{}", ties: dict[str, str] | None = None
) -> tuple[int, ...]:
    tensors = {
        "own": torch.full((3,), own),
        "empty": torch.empty(0),  # begins where the next one does
        "shared": torch.full((5,), shared),
    }
    layout, chunks = made(tensors, values, ties)
    return share.units(layout, HOLDERS).of(chunks)


def test_equal_images_have_equal_units() -> None:
    assert units_of() == units_of()
    assert len(units_of()) == 3, "values, a rank's own tensors, what it shares"


def test_a_changed_tensor_of_its_own_changes_one_unit() -> None:
    assert len(set(units_of()) & set(units_of(own=2))) == 2


def test_what_several_ranks_keep_equal_goes_by_its_name() -> None:
    assert units_of(shared=2) == units_of()


def test_changed_values_and_ties_change_one_unit() -> None:
    for other in (units_of(values=b"[]"), units_of(ties={"t": "own"})):
        assert len(set(units_of()) & set(other)) == 2


def test_shares_of_the_same_are_different_units() -> None:
    found = []
    for name in ("a", "b"):
        layout, chunks = made({name: torch.ones(2)})
        found.append(set(share.units(layout, {name: (0, 1)}).of(chunks)))
    assert len(found[0] & found[1]) == 1, "the values"


def test_more_units_than_a_slot_has_room_for_are_folded() -> None:
    def folded(last: float) -> tuple[int, ...]:
        tensors = {f"{n}": torch.ones(1) for n in range(MOST_UNITS + 10)} | {
            "own": torch.tensor([last])
        }
        layout, chunks = made(tensors)
        holders = {name: (0, 1 + n) for n, name in enumerate(tensors)} | {"own": (0,)}
        return share.units(layout, holders).of(chunks)

    assert len(folded(1)) == MOST_UNITS
    assert folded(1) == folded(1) != folded(2)
