"""What a checkpoint keeps beside plain tensors and optimizers: odd memory, generators, averages."""

import collections
import inspect
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from elastic.checkpoint.state.collect import Place, collect
from elastic.proto.errors import CheckpointError
from tests.elastic.checkpoint.load.test_restore import OPTIMIZERS, Run, restored, saved

# --- tensors -------------------------------------------------------------------------------------


def tensors(value: float) -> dict[str, torch.Tensor]:
    """Tensors of all kinds of memory; those of another value have equal shapes."""
    base = torch.arange(24.0) * value
    pair = torch.complex(base, base + value)
    return {
        "base": base,
        "view": base[4:10],
        "overlapping": base[1:13].view(3, 4),
        "every other": base[::2],
        "transposed": (base * 3).view(4, 6).t(),
        "expanded": torch.full((1, 3), value).expand(4, 3),
        "expanded twice": torch.full((), value).expand(2, 3),
        "windows": (base * 5).as_strided((4, 3), (1, 1)),
        "channels last": (base * 7).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "conjugate": pair.clone().conj(),
        "negative": (pair * 2).conj().imag,
        "leaf": (base * 9).requires_grad_(),
        "not a leaf": (base * 11).requires_grad_() * 2,
        "zero": torch.tensor(value),
        "empty": torch.empty(0, 3),
        "bool": base > 5,
        "bfloat16": base.bfloat16()[1::3],
        "complex128": pair.to(torch.complex128)[::3],
        "parameter": nn.Parameter(base * 13),
        "buffer": nn.Buffer(base * 15),
    }


def test_tensors_of_all_kinds_of_memory_are_filled_in_place() -> None:
    before, after = tensors(2), tensors(0)
    truth = {name: tensor.detach().clone() for name, tensor in before.items()}
    places = {name: tensor.data_ptr() for name, tensor in after.items()}
    told = {name: (tensor.stride(), tensor.requires_grad) for name, tensor in after.items()}
    restored(after, saved(before))
    for name, tensor in after.items():
        assert torch.equal(tensor, truth[name]), name
        assert tensor.data_ptr() == places[name]
        assert (tensor.stride(), tensor.requires_grad) == told[name]


def test_tensors_that_are_not_there_yet_are_made() -> None:
    before, after = tensors(2), {"all": None}
    restored(after, saved({"all": [before]}))
    made: Any = after["all"]
    assert made[0].keys() == before.keys()
    assert all(torch.equal(made[0][name], before[name]) for name in before)


def test_what_is_expanded_here_and_was_not_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^x is expanded in dim 0 here"):
        restored({"x": torch.zeros(1).expand(3)}, saved({"x": torch.arange(3.0)}))


def test_containers_in_containers() -> None:
    def state(value: float) -> dict[str, Any]:
        return {
            "a": [(torch.full((2,), value), {"b": torch.full((1,), value)}), []],
            "c": collections.OrderedDict(d={3: torch.full((3,), value), (1, "x"): None}),
            "e": collections.deque([torch.full((1,), value), [torch.full((2,), value)]], 5),
            "f": collections.defaultdict(list, g=[torch.full((2,), value)]),
            "h": {"i": {"j": (), "k": {}}},
        }

    after = {key: None for key in state(1)}
    restored(after, saved(state(1)))
    assert repr(after) == repr(state(1))


@pytest.mark.parametrize(
    "value",
    [
        lambda: 0, object(), torch.Generator(), torch.eye(2).to_sparse(), {torch.ones(1)},
        {torch.ones(1): 0}, np.ma.masked_array([1, 2], [True, False]), np.zeros(2, "i4,f4"),
        torch.zeros([1] * 65), nn.Linear, iter(()),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^state\.b\[1\].* cannot keep"):
        collect({"state": {"b": [1, value]}}, Place())


# --- training ------------------------------------------------------------------------------------


def having(option: str) -> list[str]:
    return [
        name
        for name in OPTIMIZERS
        if option in inspect.signature(getattr(torch.optim, name)).parameters
    ]


@pytest.mark.parametrize("name", having("foreach"))
def test_every_optimizer_that_works_on_lists(name: str) -> None:
    Run(name, foreach=True).check_that_it_goes_on_as_if_nothing_had_been(Run(name, foreach=True))


@pytest.mark.parametrize("name", having("fused"))
def test_every_fused_optimizer(name: str) -> None:
    Run(name, fused=True).check_that_it_goes_on_as_if_nothing_had_been(Run(name, fused=True))


def test_sparse_gradients() -> None:
    def run() -> tuple[nn.Embedding, dict[str, Any]]:
        torch.manual_seed(1)
        model = nn.Embedding(9, 3, sparse=True)
        return model, {"m": model, "o": torch.optim.SparseAdam(model.parameters(), lr=0.1)}

    def train(model: nn.Embedding, state: dict[str, Any], *steps: int) -> None:
        for step in steps:
            state["o"].zero_grad()
            model(torch.tensor([step, 3, 8])).square().sum().backward()
            state["o"].step()

    (one, state), (other, again) = run(), run()
    train(one, state, 0, 1)
    kept = saved(state)
    train(one, state, 2, 4, 5)
    restored(again, kept)
    train(other, again, 2, 4, 5)
    assert torch.equal(one.weight, other.weight)


SCHEDULERS: dict[str, Any] = {
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=4),
    "sequence in a chain": lambda o: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.CosineAnnealingLR(o, 9)], [2]
            ),
            lr_scheduler.MultiStepLR(o, [1, 1, 4]),
        ],
        o,
    ),
}


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_more_schedulers(name: str) -> None:
    def run() -> Run:
        made = Run("SGD", lr=0.1, momentum=0.9)
        made.scheduler = made.state["scheduler"] = SCHEDULERS[name](made.optimizer)
        return made

    run().check_that_it_goes_on_as_if_nothing_had_been(run())


class Warmup:
    """A schedule's own object, whose numbers `LambdaLR` keeps."""

    def __init__(self, over: int) -> None:
        self.over = over

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.over)


def test_a_schedule_by_an_object_of_the_scripts_own() -> None:
    def scheduler(over: int) -> lr_scheduler.LambdaLR:
        return lr_scheduler.LambdaLR(Run("SGD", lr=0.1).optimizer, Warmup(over))

    old, new = scheduler(4), scheduler(9)
    restored({"s": new}, saved({"s": old}))
    assert new.lr_lambdas[0].over == 4  # type: ignore[attr-defined]


def test_an_average_of_the_model_and_a_scaler_go_on_bit_by_bit() -> None:
    def run() -> tuple[Run, AveragedModel, torch.amp.GradScaler]:
        made = Run("AdamW")
        moving = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        average = AveragedModel(made.model, multi_avg_fn=moving, use_buffers=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        made.state |= {"average": average, "scaler": scaler}
        return made, average, scaler

    def train(made: Run, average: AveragedModel, scaler: torch.amp.GradScaler, *steps: int) -> None:
        for step in steps:
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            made.optimizer.zero_grad()
            scaler.scale(made.model(x).square().mean()).backward()
            scaler.step(made.optimizer)
            scaler.update()
            average.update_parameters(made.model)

    one, other = run(), run()
    train(*one, 0, 1, 2)
    kept = saved(one[0].state)
    train(*one, 3, 4, 5)
    restored(other[0].state, kept)
    train(*other, 3, 4, 5)
    for mine, theirs in zip(
        one[1].state_dict().values(), other[1].state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert one[2].state_dict() == other[2].state_dict()
    assert repr(one[0].optimizer.state_dict()) == repr(other[0].optimizer.state_dict())


def test_generators_of_random_numbers_go_on() -> None:
    def draw() -> list[Any]:
        return [
            torch.rand(3).tolist(), own.random(3).tolist(), np.random.rand(3).tolist(),
            random.random(), random.gauss(0, 1), torch.rand(2, generator=generator).tolist(),
        ]  # fmt: skip

    def state() -> dict[str, Any]:
        return {
            "torch": torch.get_rng_state(), "generator": generator.get_state(),
            "own": own.bit_generator.state, "numpy": np.random.get_state(),
            "legacy": np.random.get_state(legacy=False), "python": random.getstate(),
        }  # fmt: skip

    generator, own = torch.Generator().manual_seed(5), np.random.default_rng(5)
    draw()
    kept = saved(state())
    truth = draw()
    draw()
    loaded = state()
    restored(loaded, kept)
    torch.set_rng_state(loaded["torch"])
    generator.set_state(loaded["generator"])
    own.bit_generator.state = loaded["own"]
    np.random.set_state(loaded["numpy"])
    random.setstate(loaded["python"])
    assert draw() == truth
    np.random.set_state(loaded["legacy"])
    assert np.random.rand(3).tolist() == truth[2]
