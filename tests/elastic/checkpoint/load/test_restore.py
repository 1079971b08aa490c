"""Images into a state: any sharding into any other, whatever is damaged, and all that torch trains with."""

import collections
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer, lr_scheduler
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.checkpoint.load.plan import Box
from elastic.checkpoint.load.restore import Restore
from elastic.checkpoint.load.source import Mapped, Reader, Source
from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.state.collect import Place, collect
from elastic.checkpoint.state.image import CHUNK, Piece, lay_out
from elastic.checkpoint.state.tensors import Part
from elastic.proto.errors import CheckpointError

ALONE = Place()
Range = tuple[int, int]


def source(parts: dict[str, Part], ties: dict[str, str], values: str, where: str) -> Source:
    image = lay_out([part.piece for part in parts.values()], ties, len(values))
    tensors = {name: part.tensor for name, part in parts.items()}
    data = memoryview(bytearray(image.nbytes))
    chunks = copy_cpu.write(image, tensors, values.encode(), data)
    return Source(where=where, image=image, reader=Mapped(data), chunks=chunks)


def saved(state: dict[str, Any], where: str = "the slot of rank 0") -> Source:
    found = collect(state, ALONE)
    return source(found.parts, found.ties, found.values, where)


def restored(state: dict[str, Any], *sources: Source, strict: bool = True) -> Restore:
    restore = Restore(sources, ALONE)
    restore.apply(state, strict=strict)
    return restore


def damage(one: Source, name: str) -> None:
    one.reader.read(0, one.image.nbytes)[one.image.starts[name]] ^= 1


# --- shards --------------------------------------------------------------------------------------


def part(whole: torch.Tensor, box: Box) -> Part:
    piece = Piece(
        name="w", dtype="float32", shape=tuple(whole.shape), offset=box.offset, extent=box.extent
    )
    region = tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))
    return Part(piece=piece, tensor=whole[region], holders=(0,))


@st.composite
def split(draw: st.DrawFn, shape: tuple[int, int]) -> list[Box]:
    """A tensor in stripes, 1 to 4 of them, each of any size."""
    dim = draw(st.integers(0, 1))
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    boxes = []
    for start, end in zip([0, *cuts], [*cuts, shape[dim]], strict=True):
        offset, extent = [0, 0], list(shape)
        offset[dim], extent[dim] = start, end - start
        boxes.append(Box(tuple(offset), tuple(extent)))
    return boxes


cases = st.tuples(st.integers(1, 6), st.integers(1, 6)).flatmap(
    lambda shape: st.tuples(st.just(shape), split(shape), split(shape))
)


def sharded(whole: torch.Tensor, boxes: list[Box], where: str = "rank") -> list[Source]:
    return [
        source({"w": part(whole, box)}, {}, "{}", f"{where} {n}") for n, box in enumerate(boxes)
    ]


def noise(shape: tuple[int, int]) -> torch.Tensor:
    """Any bits, NaNs of all kinds among them."""
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32).view(torch.float32)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@given(cases)
def test_any_split_is_loaded_into_any_other(
    case: tuple[tuple[int, int], list[Box], list[Box]],
) -> None:
    shape, written, wanted = case
    whole, result = noise(shape), torch.zeros(shape)
    restore = Restore(sharded(whole, written), ALONE)
    for box in wanted:
        target = part(result, box)
        assert restore.fill({"w": target} if target.piece.nbytes else {}) == []
    assert same(result, whole)
    assert restore.damaged == []


@given(cases, st.data())
def test_what_is_damaged_is_taken_from_who_else_has_it(
    case: tuple[tuple[int, int], list[Box], list[Box]], data: st.DataObject
) -> None:
    shape, written, others = case
    whole, result = noise(shape), torch.zeros(shape)
    copies = data.draw(st.permutations([*written, *others]))  # some of which are of no use
    sources = sharded(whole, written) + sharded(whole, copies, "copy of")
    bad = data.draw(st.sampled_from(sources[: len(written)]))
    if bad.image.pieces["w"].nbytes:
        damage(bad, "w")
    restore = Restore(sources, ALONE)
    assert restore.fill({"w": part(result, Box((0, 0), shape))}) == []
    assert same(result, whole)
    assert set(restore.damaged) == (
        {f"{bad.where}: w is damaged"} if bad.image.pieces["w"].nbytes else set()
    )


@pytest.mark.parametrize("whole", [True, False])
def test_another_ranks_own_tensor_of_the_same_name_is_no_copy(whole: bool) -> None:
    """Nor is a piece of it that lies elsewhere in memory's order, though its bits may be equal."""
    every, half = Box((0, 0), (2, 2)), Box((0, 0), (1, 2))
    mine, theirs = torch.ones(2, 2), torch.full((2, 2), 2.0) if whole else torch.ones(2, 2)
    sources = sharded(mine, [every], "slot") + sharded(theirs, [every if whole else half], "other")
    damage(sources[0], "w")
    result = torch.full((2, 2), 7.0)
    with pytest.raises(CheckpointError, match=r"^slot 0: w is damaged, and there is no other copy"):
        Restore(sources, ALONE).fill({"w": part(result, half)})
    assert result.tolist() == [[7, 7], [7, 7]]


@pytest.mark.parametrize(("theirs", "copy"), [("12", True), ("34", False)])
def test_what_ranks_keep_equal_is_a_copy_whatever_its_bits(theirs: str, copy: bool) -> None:
    """Their marks say so, where they are the same."""
    sources = [saved({"w": torch.full((3,), n)}, f"file {n}") for n in range(2)]
    for one, mark in zip(sources, ("12", theirs), strict=True):
        one.image = replace(one.image, shared={(0, 1): {"w": mark}})
    damage(sources[0], "w")
    state = {"w": torch.full((3,), 7)}
    if copy:
        assert restored(state, *sources).damaged == ["file 0: w is damaged"]
    else:
        with pytest.raises(CheckpointError, match=r"^file 0: w is damaged, and there is no other"):
            restored(state, *sources)
    assert state["w"].tolist() == ([1, 1, 1] if copy else [7, 7, 7])


def test_who_is_preferred_is_read() -> None:
    whole = Box((0, 0), (2, 2))
    near, far = sharded(torch.ones(2, 2), [whole]) + sharded(torch.zeros(2, 2), [whole])
    result = torch.full((2, 2), 7.0)
    assert Restore([near, far], ALONE).fill({"w": part(result, whole)}) == []
    assert result.tolist() == [[1, 1], [1, 1]]


def test_what_is_damaged_everywhere_is_named() -> None:
    sources = [saved({"w": torch.ones(3), "b": torch.ones(3)}, f"file {n}") for n in range(2)]
    for one in sources:
        damage(one, "w")
    state = {"w": torch.zeros(3), "b": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"^file 1: w is damaged, and there is no other copy"):
        restored(state, *sources)
    damage(sources[1], "b")
    only_b = {"b": torch.zeros(3)}
    assert restored(only_b, *sources).damaged == []
    assert only_b["b"].tolist() == [1, 1, 1]


def test_damaged_values_are_taken_from_who_else_has_them() -> None:
    sources = [saved({"n": 5}, f"file {n}") for n in range(2)]
    sources[0].reader.read(0, sources[0].image.nbytes)[sources[0].image.values_at] ^= 1
    state = {"n": 0}
    assert restored(state, *sources).damaged == ["file 0: the values are damaged"]
    assert state == {"n": 5}
    with pytest.raises(CheckpointError, match=r"^file 0: the values are damaged"):
        restored(state, sources[0])


def test_values_of_its_own_are_not_taken_from_who_has_others() -> None:
    sources = [saved({"n": 5, "w": torch.ones(2)}), saved({"n": 6, "w": torch.ones(2)}, "other")]
    sources[0].reader.read(0, sources[0].image.nbytes)[sources[0].image.values_at] ^= 1
    state = {"n": 0, "w": torch.zeros(2)}
    with pytest.raises(
        CheckpointError, match=r"slot of rank 0: the values are damaged, and nobody"
    ):
        restored(state, *sources)
    assert state["n"] == 0
    assert state["w"].tolist() == [0, 0]  # type: ignore[attr-defined]


def test_values_of_others_are_read_only_where_they_are_needed() -> None:
    sources = [saved({"n": 5}), saved({"n": 5, "m": 6}, "other")]
    watched = watch(sources[1])
    restored({"n": 0}, *sources)
    assert watched.spans == []
    state = {"n": 0, "m": 0}
    restored(state, *sources)
    assert state == {"n": 5, "m": 6}


def test_damage_is_told_once() -> None:
    sources = [saved({"n": [torch.ones(3)]}, f"file {n}") for n in range(2)]
    damage(sources[0], "n[0]")
    state = {"n": [torch.zeros(3)]}
    assert restored(state, *sources).damaged == ["file 0: n[0] is damaged"]
    assert state["n"][0].tolist() == [1, 1, 1]


class Watched(Mapped):
    """Notes what is read of it; a part of it may be out of reach."""

    def __init__(self, inner: Reader, lost: range = range(0)) -> None:
        self._inner, self._lost = inner, lost
        self.spans: list[tuple[int, int]] = []

    def read(self, start: int, end: int) -> memoryview:
        if start in self._lost:
            raise OSError("the other end is gone")
        self.spans.append((start, end))
        return self._inner.read(start, end)


def watch(one: Source, lost: range = range(0)) -> Watched:
    one.reader = Watched(one.reader, lost)
    return one.reader


ROWS = 3 * CHUNK // 4 // 1024
"""Of a tensor of three chunks, with 1024 columns of 4 bytes."""


def large() -> torch.Tensor:
    return noise((ROWS, 1024))


def test_only_chunks_that_are_needed_are_read() -> None:
    whole = large()
    (one,) = sharded(whole, [Box((0, 0), (ROWS, 1024))])
    watched, at = watch(one), one.image.starts["w"]
    box = Box((ROWS // 3 + 1, 0), (5, 1024))
    result = torch.zeros(5, 1024)
    target = Part(piece=part(whole, box).piece, tensor=result, holders=(0,))
    assert Restore([one], ALONE).fill({"w": target}) == []
    assert same(result, whole[ROWS // 3 + 1 :][:5])
    assert watched.spans == [(at + CHUNK, at + 2 * CHUNK)]


@pytest.mark.parametrize("box", [Box((0, 3), (ROWS, 5)), Box((0, 0), (ROWS, 1024))])
def test_copies_that_are_damaged_in_different_chunks_make_a_whole_one(box: Box) -> None:
    whole, every = large(), Box((0, 0), (ROWS, 1024))
    sources = sharded(whole, [every]) + sharded(whole, [every], "copy")
    for number, chunk in ((0, 0), (0, 2), (1, 1)):
        one = sources[number]
        one.reader.read(0, one.image.nbytes)[one.image.starts["w"] + chunk * CHUNK + 14] ^= 1
    result = torch.zeros(ROWS, 1024)
    restore = Restore(sources, ALONE)
    assert restore.fill({"w": part(result, box)}) == []
    region = tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))
    assert same(result[region], whole[region])
    assert restore.damaged == ["rank 0: w is damaged"]


def test_who_is_out_of_reach_is_replaced_by_who_is_not() -> None:
    whole = Box((0, 0), (2, 2))
    sources = sharded(torch.ones(2, 2), [whole]) + sharded(torch.ones(2, 2), [whole], "copy")
    watch(sources[0], range(1, 10**6))
    result = torch.zeros(2, 2)
    restore = Restore(sources, ALONE)
    assert restore.fill({"w": part(result, whole)}) == []
    assert result.tolist() == [[1, 1], [1, 1]]
    assert restore.damaged == ["rank 0: w cannot be read: the other end is gone"]


# --- states --------------------------------------------------------------------------------------


def test_every_value_comes_back() -> None:
    def state(full: bool) -> dict[str, Any]:
        return {
            "n": 3 if full else 0,
            "list": [1, (2.5, None), torch.ones(2)] if full else [],
            "nested": {
                "t": torch.arange(3.0) if full else torch.zeros(3),
                "deep": {"s": "text" if full else "", "x": {2, 3} if full else set()},
            },
            "counter": collections.Counter("aab" if full else ""),
            "bits": torch.arange(4)[::2].to(torch.complex64) if full else torch.zeros(2) * 1j,
        }

    before, after = state(True), state(False)
    kept = after["nested"]["t"]
    restored(after, saved(before))
    assert repr(after) == repr(before)
    assert type(after["counter"]) is collections.Counter
    assert after["nested"]["t"] is kept, "filled in place"


def test_a_list_of_tensors_is_filled_in_place_if_it_is_as_it_was() -> None:
    def state(value: float, count: int = 2, size: int = 2) -> list[torch.Tensor]:
        return [torch.full((size,), value) for _ in range(count)]

    averages, more, larger, pair = state(0), state(0), state(0), (*state(0),)
    before = {"a": state(1), "b": state(2, count=3), "c": state(3, size=3), "d": (*state(4),)}
    after: dict[str, Any] = {"a": averages, "b": more, "c": larger, "d": pair}
    restored(after, saved(before))
    assert repr(after) == repr(before)
    assert after["a"] is averages
    assert (after["d"], len(more), len(larger)) == (pair, 2, 2)


@pytest.mark.parametrize("kind", [list, lambda tensors: dict(zip("xy", tensors, strict=True))])
def test_tensors_that_were_others_when_they_were_saved_are_made_anew(kind: Any) -> None:
    """As averages that begin as the parameters themselves, or as one tensor many times."""
    old = nn.Linear(1, 1, bias=False)
    before = {"m": old, "a": kind([torch.full((1, 1), 5.0), torch.ones(1, 1)])}
    for first in "ma":
        model = nn.Linear(1, 1, bias=False)
        kept = model.weight.detach()
        state: dict[str, Any] = {"m": model, "a": kind([kept, kept])}
        after = {key: state[key] for key in (first, *state)}
        restored(after, saved(before))
        assert repr(after["a"]) == repr(before["a"])
        assert torch.equal(model.weight, old.weight)


class _Casts(nn.Module):
    """Its `state_dict` has copies, as that of one that keeps its weights in another form."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value))
        self.seen = int(value)
        self.register_state_dict_post_hook(self._cast)  # type: ignore[no-untyped-call]

    @staticmethod
    def _cast(module: Any, found: dict[str, Any], prefix: str, _: object) -> None:
        found[f"{prefix}w"] = found[f"{prefix}w"].detach().double()


class _Own(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value))
        self.seen = int(value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = {name: t.clone() for name, t in super().state_dict(*args, **kwargs).items()}
        return {**found, "seen": self.seen}

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        self.seen = state["seen"]
        return super().load_state_dict({"w": state["w"]})


def test_what_a_modules_state_dict_makes_for_it_is_loaded_by_its_own_means() -> None:
    def model(value: float) -> nn.ModuleDict:
        return nn.ModuleDict({"casts": _Casts(value), "plain": nn.Linear(2, 2)})

    new, own, old = model(0.0), _Own(0.0), model(7.0)
    weight = new["plain"].weight
    restored({"m": new, "o": own}, saved({"m": old, "o": _Own(8.0)}))
    assert dict(new.named_parameters())["casts.w"].tolist() == [7, 7, 7]
    assert weight is new["plain"].weight
    assert torch.equal(weight, old["plain"].weight)  # type: ignore[arg-type]
    assert (own.w.tolist(), own.seen) == ([8, 8, 8], 8)


class _Extra(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value))
        self.seen = value

    def get_extra_state(self) -> float:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_what_another_rank_has_of_a_model_comes_from_its_image() -> None:
    """As in a larger world, to a rank that has no image of its own."""

    def stage(name: str, value: float) -> dict[str, Any]:
        return {"m": nn.ModuleDict({name: nn.ModuleList([_Casts(value), _Extra(value)])})}

    state = stage("1", 0.0)
    restored(state, saved(stage("0", 5.0)), saved(stage("1", 7.0), "rank 1"))
    casts, extra = state["m"]["1"]
    assert (casts.w.tolist(), extra.w.tolist(), extra.seen) == ([7, 7, 7], [7, 7, 7], 7)


def test_what_a_module_keeps_beside_its_tensors_passes_by_what_wraps_it() -> None:
    def wrapped(module: nn.Module) -> dict[str, Any]:
        return {"m": nn.ModuleList([checkpoint_wrapper(module)])}

    extra = _Extra(0.0)
    restored(wrapped(extra), saved(wrapped(_Extra(7.0))))
    assert (extra.w.tolist(), extra.seen) == ([7, 7, 7], 7)


def test_what_is_not_saved_of_a_module_may_be_of_any_kind() -> None:
    """Such as the sparse matrix of a graph."""

    def model(value: float) -> nn.Module:
        module = _Extra(value)
        module.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
        return module

    new = model(0.0)
    restored({"m": new}, saved({"m": model(7.0)}))
    assert new.get_parameter("w").tolist() == [7, 7, 7]


class _Grows(nn.Module):
    """Has more to keep once it was trained, and something that follows from its weights."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value))
        self.mean: torch.Tensor | None = None
        self.twice = 2 * value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return found if self.mean is None else {**found, "mean": self.mean}

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        self.mean = state.get("mean")
        self.twice = 2 * float(state["w"].numpy()[0])
        return super().load_state_dict({"w": state["w"]})


def test_a_modules_own_load_state_dict_has_all_that_was_saved() -> None:
    for mean in (None, torch.full((2,), 5.0)):
        old, new = _Grows(7.0), _Grows(0.0)
        old.mean = mean
        restored({"m": new}, saved({"m": old}))
        assert (new.w.tolist(), new.twice) == ([7, 7, 7], 14)
        assert mean is None or (new.mean is not None and new.mean.tolist() == [5, 5])


def test_a_state_dict_that_a_script_has_put_into_a_module_is_its_own() -> None:
    model = nn.Linear(2, 2)
    model.state_dict = lambda: {"bias": model.bias}  # type: ignore[method-assign,assignment]
    assert list(saved({"m": model}).image.pieces) == ["m.bias"]


def test_an_optimizer_whose_parameters_all_have_other_names_is_refused() -> None:
    def run() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(2, 1)
        return model, torch.optim.Adam(model.parameters())

    (model, optimizer), (_, new) = run(), run()
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    with pytest.raises(
        CheckpointError, match=r"o: its parameters are called 'parameter 0' .* 'm\.w"
    ):
        restored({"o": new}, saved({"m": model, "o": optimizer}))


def test_an_optimizer_that_another_rank_had_needs_no_state() -> None:
    """As that of a stage that is not trained, on a rank of a larger world."""

    def stage(name: str, trained: bool) -> dict[str, Any]:
        model = nn.ModuleDict({name: nn.Linear(2, 1)})
        optimizer = torch.optim.Adam(model.parameters())
        if trained:
            torch.autograd.backward(model[name](torch.ones(1, 2)).sum())
            optimizer.step()
        return {"m": model, "o": optimizer}

    frozen = stage("1", False)
    restored(frozen, saved(stage("0", True)), saved(stage("1", False), "rank 1"))
    assert not frozen["o"].state


def test_a_new_optimizer_of_shards_wants_no_more_than_its_own() -> None:
    """As on one of several nodes, whose memory has the images of its own ranks alone."""

    def run() -> dict[str, Any]:
        own = torch.arange(4.0).view(2, 2).requires_grad_()
        x = DTensor.from_local(own, mesh, [Shard(0)])
        parameter = nn.Parameter(x.detach().requires_grad_())
        return {"x": parameter, "o": torch.optim.Adam([parameter])}

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh, place = DeviceMesh("cpu", torch.arange(2)), Place(rank=1, world_size=2)
        old, new = run(), run()
        old["x"].grad = torch.ones_like(old["x"])
        old["o"].step()
        found = collect(old, place)
        Restore([source(found.parts, found.ties, found.values, "own")], place).apply(
            new, strict=True
        )
        (before,), (after,) = old["o"].state.values(), new["o"].state.values()
        assert torch.equal(after["exp_avg"].to_local(), before["exp_avg"].to_local())
        assert after["exp_avg"].to_local().any()
    finally:
        dist.destroy_process_group()


def test_what_another_rank_has_tied_is_not_here() -> None:
    shared = torch.ones(2)
    own = saved({"x": torch.full((2,), 5.0), "y": torch.full((2,), 6.0)})
    for other in ({"x": shared, "y": shared}, {"y": shared, "x": shared}):
        state = {"x": torch.zeros(2), "y": torch.zeros(2)}
        restored(state, own, saved(other, "rank 1"))
        assert (state["x"].tolist(), state["y"].tolist()) == ([5, 5], [6, 6])


def test_the_optimizers_state_of_what_was_tied_comes_to_its_copy() -> None:
    """As that of a language model's head, on a pipeline's last stage, when it was saved by one rank."""
    words = nn.Linear(2, 2, bias=False)
    whole = nn.ModuleDict({"embedding": words, "head": words})
    optimizer = torch.optim.Adam(whole.parameters())
    torch.autograd.backward(words(torch.ones(1, 2)).sum())
    optimizer.step()
    last = nn.ModuleDict({"head": nn.Linear(2, 2, bias=False)})
    new = torch.optim.Adam(last.parameters())
    restored({"m": last, "o": new}, saved({"m": whole, "o": optimizer}))
    (moments,) = new.state.values()
    assert torch.equal(moments["exp_avg"], optimizer.state[words.weight]["exp_avg"])


def test_conjugates_and_other_strides_are_filled() -> None:
    x = torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3)
    state = {"x": torch.zeros(3, 2, dtype=torch.complex64).t().conj()}
    restored(state, saved({"x": x}))
    assert torch.equal(state["x"], x)


def test_ties_may_come_and_go() -> None:
    def model(tied: bool) -> nn.Module:
        module = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
        if tied:
            module[1].weight = module[0].weight
        return module

    for before, after in ((True, True), (True, False), (False, True)):
        old, new = model(before), model(after)
        restored({"m": new}, saved({"m": old}))
        assert torch.equal(new[0].weight, old[0].weight)  # type: ignore[index]
        if before or not after:
            assert torch.equal(new[1].weight, old[1].weight)  # type: ignore[index]


@pytest.mark.parametrize(
    "more",
    [
        {"new": torch.zeros(2)},
        {"new": 5},
        {"in": {"new": 5}},
        {"m": nn.Linear(2, 2, bias=True)},
        {"new": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
    ],
)
def test_what_the_checkpoint_has_not_is_named_if_strict(more: dict[str, Any]) -> None:
    one = saved({"m": nn.Linear(2, 2, bias=False), "in": {}, "n": 5})
    state = {"n": 0} | more
    with pytest.raises(CheckpointError, match=r"^the checkpoint has no .*(new|m\.bias)"):
        restored(state, one)
    restored(state, one, strict=False)
    assert state["n"] == 5
    assert state.keys() == {"n"} | more.keys()


def test_what_the_state_has_not_is_left_out() -> None:
    state = {"n": 0}
    restored(state, saved({"n": 5, "other": torch.ones(3), "more": {"x": 1}}))
    assert state == {"n": 5}


def test_a_dict_in_the_state_gets_what_only_the_checkpoint_has() -> None:
    state: dict[str, Any] = {"in": {"a": 0, "deep": {}}}
    inner = state["in"]
    restored(state, saved({"in": {"a": 1, "t": torch.ones(2), "deep": {"x": (1, 2)}}}))
    assert state["in"] is inner
    assert inner.pop("t").tolist() == [1, 1]
    assert inner == {"a": 1, "deep": {"x": (1, 2)}}


def test_a_module_that_was_something_else_is_refused() -> None:
    with pytest.raises(CheckpointError, match="m is a module here and something else in the"):
        restored({"m": nn.Module()}, saved({"m": 5}))


def test_only_what_is_named_is_loaded() -> None:
    def state(fill: float) -> dict[str, Any]:
        model = nn.ModuleDict({"a": nn.Linear(1, 1), "ab": nn.Linear(1, 1)})
        for parameter in model.parameters():
            nn.init.constant_(parameter, fill)
        optimizer = torch.optim.SGD(model.parameters(), lr=fill)
        return {"m": model, "o": optimizer, "d": {"n": fill, "k": fill}, "n": fill}

    def loaded(*only: str) -> list[float]:
        found = state(1.0)
        restore = Restore([saved(state(2.0))], ALONE, only)
        restore.apply(found, strict=True)
        return [
            *(p.sum().item() for p in found["m"].parameters()),
            found["o"].param_groups[0]["lr"],
            *found["d"].values(),
            found["n"],
        ]

    assert loaded("m.a", "d.k") == [2, 2, 1, 1, 1, 1, 2, 1]
    assert loaded("m", "n") == [2, 2, 2, 2, 1, 1, 1, 2]
    assert loaded("o") == [1, 1, 1, 1, 2, 1, 1, 1]
    assert loaded() == [1] * 8
    for typo in ("mm", "m.b", "d.x", "o.state"):
        with pytest.raises(CheckpointError, match=rf"only names '{typo}', which the state"):
            loaded(typo)


@pytest.mark.parametrize("other", [3, [1], {"state": {}}, None])
def test_an_optimizer_that_was_something_else_is_refused(other: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(CheckpointError, match="o is an optimizer here and something else"):
        restored({"o": optimizer}, saved({"o": other}))


def test_another_number_of_groups_is_refused() -> None:
    def optimizer(groups: int) -> Optimizer:
        return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(groups)])

    with pytest.raises(CheckpointError, match="2 groups of parameters here and 1 in the"):
        restored({"o": optimizer(2)}, saved({"o": optimizer(1)}))


def test_extra_state_of_modules_comes_back() -> None:
    class Counting(nn.Linear):
        seen: Any = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen, "t": torch.ones(2)}

        def set_extra_state(self, state: Any) -> None:
            self.seen = (state["seen"], state["t"].tolist())

    old, new = (nn.Sequential(Counting(1, 1)) for _ in range(2))
    old[0].seen = 7  # type: ignore[assignment]
    restored({"m": new}, saved({"m": old}))
    assert new[0].seen == (7, [1, 1])


# --- training ------------------------------------------------------------------------------------

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    if name != "SparseAdam"  # takes no dense gradient
)
SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 2), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 9),
}


class Run:
    """A small training: two layers without biases, since not every optimizer takes vectors."""

    def __init__(self, optimizer: str, scheduler: str | None = None, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)
        )
        kind = getattr(torch.optim, optimizer)
        self.optimizer: Optimizer = kind(self.model.parameters(), **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.scheduler = None
        if scheduler is not None:
            self.scheduler = self.state["scheduler"] = SCHEDULERS[scheduler](self.optimizer)

    def train(self, *steps: int) -> None:
        for step in steps:
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))

            def loss(x: torch.Tensor = x) -> torch.Tensor:
                self.optimizer.zero_grad()
                out: torch.Tensor = self.model(x).square().mean()
                torch.autograd.backward(out)
                return out

            self.optimizer.step(loss)  # type: ignore[arg-type]
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(float(step))
            elif self.scheduler is not None:
                self.scheduler.step()

    def check_that_it_goes_on_as_if_nothing_had_been(self, again: "Run") -> None:
        self.train(0, 1, 2)
        one = saved(self.state)
        self.train(3, 4)
        restored(again.state, one)
        again.train(3, 4)
        for mine, other in zip(self.model.parameters(), again.model.parameters(), strict=True):
            assert same(mine.detach(), other.detach())
        assert repr(self.optimizer.state_dict()) == repr(again.optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_bit_by_bit(name: str) -> None:
    Run(name).check_that_it_goes_on_as_if_nothing_had_been(Run(name))


def test_what_is_loaded_in_inference_mode_is_trained_on() -> None:
    one, other = Run("AdamW"), Run("AdamW")
    one.train(0)
    with torch.inference_mode():
        restored(other.state, saved(one.state))
    for run in (one, other):
        run.train(1)
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {"amsgrad": True, "foreach": True}),
        ("Adam", {"lr": torch.tensor(0.01)}),
        ("AdamW", {"fused": True}),
        ("RMSprop", {"centered": True, "momentum": 0.9}),
        ("ASGD", {"t0": 1}),
        ("LBFGS", {"line_search_fn": "strong_wolfe"}),
    ],
)
def test_optimizers_with_options_go_on_bit_by_bit(name: str, options: dict[str, Any]) -> None:
    Run(name, **options).check_that_it_goes_on_as_if_nothing_had_been(Run(name, **options))


def test_every_scheduler_is_tried() -> None:
    kinds = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert SCHEDULERS.keys() == kinds - {"LRScheduler", "_LRScheduler"}


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_every_scheduler_goes_on_bit_by_bit(name: str) -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    Run("SGD", name, **options).check_that_it_goes_on_as_if_nothing_had_been(
        Run("SGD", name, **options)
    )


def test_a_scheduler_goes_on_in_a_run_that_had_gone_elsewhere() -> None:
    again = Run("Adam", "StepLR")
    again.train(7, 8)
    Run("Adam", "StepLR").check_that_it_goes_on_as_if_nothing_had_been(again)
