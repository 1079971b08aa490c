"""How a run goes on from what was saved of it, and what it must not take over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.checkpoint import Checkpointer
from elastic.checkpoint.save.saving import Saver
from elastic.data import Skips
from elastic.proto.errors import CheckpointError, UsageError
from elastic.trainer.arguments.checkpointing import CheckpointFlags
from elastic.trainer.checkpoints import identity_of
from elastic.trainer.model.recompute import Recompute
from elastic.trainer.parallel.layout import Layout
from elastic.trainer.run import state as states
from elastic.trainer.run.plan import Plan
from elastic.trainer.schedules import BatchSizes
from elastic.trainer.watch import guard
from tests.elastic.checkpoint.steps import flip
from tests.trainer import forks
from tests.trainer.model.shapes import GPT2
from tests.trainer.run.agreeing import SIZES
from tests.trainer.run.reported import HEARD

CONFIG = {"num_layers": 1}


def state(conditions: str, *, skips: tuple[tuple[int, int], ...] = ()) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    return {
        "identity": CONFIG, "conditions": {"tensor parallel": conditions}, "recipe": {"lr": 0.1}, "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()), "tops": torch.zeros(2, dtype=torch.int64),
        "guard": guard.to_json(guard.State(skips=Skips(ranges=skips))), "job": states.job(),
    }  # fmt: skip


def saved(folder: Path) -> dict[str, Any]:
    """What a run of other conditions has saved, which leaves samples out."""
    held = state("of before", skips=((8, 16),))
    with Checkpointer(folder) as checkpoint:
        checkpoint.save(3, held, persist=True)
        checkpoint.wait()
    return held


def test_conditions_that_are_asked_for_are_those_of_what_is_saved_from_then_on(
    tmp_path: Path,
) -> None:
    before, now = saved(tmp_path), state("of now")
    flags = CheckpointFlags(save=str(tmp_path), other_conditions=True)
    with Checkpointer(tmp_path) as checkpoint:
        found = states.resume(checkpoint, now, flags, exact=True)
    said = "resumed under other conditions: tensor parallel of before -> of now"
    assert found == (3, [said])
    assert now["conditions"] == {"tensor parallel": "of now"}
    assert now["guard"] == before["guard"]
    assert torch.equal(now["model"].weight, before["model"].weight)


def test_samples_that_were_left_out_stay_so_where_a_run_is_begun_from_another(
    tmp_path: Path,
) -> None:
    before, now = saved(tmp_path), state("of now")
    flags = CheckpointFlags(load=str(tmp_path), no_load_optim=True)
    said = "resumed under other conditions: tensor parallel of before -> of now"
    assert states.begin(now, flags) == (3, [said])
    assert guard.from_json(now["guard"]).skips.ranges == ((8, 16),)
    assert now["conditions"] == {"tensor parallel": "of now"}
    assert torch.equal(now["model"].weight, before["model"].weight)


def test_what_a_run_is_begun_from_gets_no_memory_for_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    monkeypatch.delattr(Saver, "prepare")
    assert states.begin(state("of now"), CheckpointFlags(load=str(tmp_path)))[0] == 3


@pytest.mark.parametrize(("launch", "same"), [("a", True), ("b", False), ("", False)])
def test_ranks_that_are_started_anew_know_when_their_job_began(
    tmp_path: Path, launch: str, same: bool
) -> None:
    held, now = state("of now"), state("of now")
    held["job"] = {"launch": launch and "a", "began": 7000, "ends": True}
    now["job"]["launch"] = launch
    with Checkpointer(tmp_path) as checkpoint:
        checkpoint.save(3, held, persist=True)
        checkpoint.wait()
        flags = CheckpointFlags(save=str(tmp_path))
        assert states.resume(checkpoint, now, flags, exact=True) == (3, [])
    assert now["job"].get("ends", False) == same
    assert (now["job"]["began"] == 7000) == same


def damaged(folder: Path, *steps: int) -> None:
    """Of steps on storage, which are 3 and 4."""
    held = state("of now")
    with Checkpointer(folder) as checkpoint:
        for step in (3, 4):
            held["model"].weight.data.fill_(step)
            checkpoint.save(step, held, persist=True)
            checkpoint.wait()
    for step in steps:
        (file,) = (folder / f"step-{step:08}").glob("shard-*")
        flip(file, "model.weight")


def test_a_damaged_step_is_passed_over_where_nobody_starts_ranks_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged(tmp_path, 4)
    now, begun = state("of now"), state("of now")
    flags = CheckpointFlags(save=str(tmp_path))
    with Checkpointer(tmp_path) as checkpoint:
        assert states.resume(checkpoint, now, flags, exact=True) == (3, [])
    assert now["model"].weight.unique().tolist() == [3]
    said = capsys.readouterr().out
    assert said.startswith(
        f"what is newest in {tmp_path} is damaged ({tmp_path}/step-00000004/shard-"
    )
    assert said.endswith("no other copy of it): the run goes on from step 3\n")
    assert states.begin(begun, CheckpointFlags(load=str(tmp_path))) == (3, [])
    assert begun["model"].weight.unique().tolist() == [3]


def test_a_damaged_step_that_is_asked_for_is_an_error_with_the_one_before_it(
    tmp_path: Path,
) -> None:
    damaged(tmp_path, 4)
    flags = CheckpointFlags(load=str(tmp_path), ckpt_step=4)
    with pytest.raises(CheckpointError, match=r"is damaged.*; --ckpt-step 3 takes the step before"):
        states.begin(state("of now"), flags)


def test_where_all_steps_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    damaged(tmp_path, 3, 4)
    flags, now = CheckpointFlags(save=str(tmp_path)), state("of now")
    with Checkpointer(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="is damaged"):
        states.resume(checkpoint, now, flags, exact=True)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_scale_begins_anew_where_there_was_none(tmp_path: Path, scaled: bool) -> None:
    before = state("of before")
    if scaled:
        before["loss_scale"] = torch.tensor([64.0, 7.0, 2.0], dtype=torch.float64)
    with Checkpointer(tmp_path) as checkpoint:
        checkpoint.save(3, before, persist=True)
        checkpoint.wait()
    now = state("of now")
    now["loss_scale"] = torch.tensor([1024.0, 0.0, 2.0], dtype=torch.float64)
    flags = CheckpointFlags(save=str(tmp_path), other_conditions=True)
    with Checkpointer(tmp_path) as checkpoint:
        assert states.resume(checkpoint, now, flags, exact=True)[0] == 3
    assert now["loss_scale"].tolist() == ([64.0, 7.0, 2.0] if scaled else [1024.0, 0.0, 2.0])
    assert torch.equal(now["model"].weight, before["model"].weight)


def test_the_names_of_reports_go_on_and_are_none_where_none_were_saved(tmp_path: Path) -> None:
    before, told = state(""), ["loss of code", "loss of text"]
    flags = CheckpointFlags(save=str(tmp_path))
    for step, names in ((3, []), (4, told)):
        with Checkpointer(tmp_path) as checkpoint:
            checkpoint.save(step, before, persist=True)
            checkpoint.wait()
        now = state("") | {"reports": []}
        with Checkpointer(tmp_path) as checkpoint:
            assert states.resume(checkpoint, now, flags, exact=True)[0] == step
        assert now["reports"] == names
        before["reports"] = told


@pytest.mark.parametrize("exact", [True, False])
def test_another_recipe_is_said_and_not_refused(tmp_path: Path, exact: bool) -> None:
    before, now = state(""), state("")
    now["recipe"] = {"lr": 0.2, "guard": "off"}
    with Checkpointer(tmp_path) as checkpoint:
        checkpoint.save(3, before, persist=True)
        checkpoint.wait()
        flags = CheckpointFlags(save=str(tmp_path))
        found = states.resume(checkpoint, now, flags, exact=exact)
    assert found == (3, ["resumed with another recipe: lr 0.1 -> 0.2, guard None -> off"])
    assert now["recipe"]["lr"] == 0.2, "what is saved from then on is made by it"


def test_a_checkpoint_that_says_no_recipe_is_gone_on_from(tmp_path: Path) -> None:
    before, now = state(""), state("")
    del before["recipe"]
    with Checkpointer(tmp_path) as checkpoint:
        checkpoint.save(3, before, persist=True)
        checkpoint.wait()
        flags = CheckpointFlags(save=str(tmp_path))
        assert states.resume(checkpoint, now, flags, exact=True) == (3, [])


def test_data_that_were_known_by_their_length_may_be_any(tmp_path: Path) -> None:
    held, now = state(""), state("")
    held["identity"], now["identity"] = {"data": "12"}, {"data": "Script"}
    flags = CheckpointFlags(save=str(tmp_path))
    with Checkpointer(tmp_path) as checkpoint:
        checkpoint.save(3, held, persist=True)
        checkpoint.wait()
        assert states.resume(checkpoint, now, flags, exact=True) == (3, [])
        held["identity"] = {"data": "Others"}
        checkpoint.save(4, held, persist=True)
        checkpoint.wait()
        with pytest.raises(UsageError, match="was trained on other samples"):
            states.resume(checkpoint, now, flags, exact=True)


def test_another_tokenizer_is_another_run(tmp_path: Path) -> None:
    model, held = {**identity_of(GPT2), "data": ""}, state("")
    with Checkpointer(tmp_path) as checkpoint:
        for step, said in ((3, {}), (4, {"tokenizer": "a"})):
            held["identity"] = model | said
            checkpoint.save(step, held, persist=True)
            checkpoint.wait()
    now = state("") | {"identity": model | {"tokenizer": "b"}}
    with pytest.raises(UsageError, match=r"step 4 in .* was trained with another tokenizer: give"):
        states.begin(now, CheckpointFlags(load=str(tmp_path)))
    tuned = CheckpointFlags(load=str(tmp_path), save=str(tmp_path / "mine"), finetune=True)
    assert states.begin(now, tuned)[0] == 0
    old = CheckpointFlags(load=str(tmp_path), ckpt_step=3)
    assert states.begin(now, old)[0] == 3, "which does not say of its own"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("identity", "no checkpoint of elastic.trainer"),
        ("conditions", "a model alone: give --load"),
    ],
)
def test_a_model_alone_is_no_run_to_go_on_with(tmp_path: Path, name: str, said: str) -> None:
    before, now = state(""), state("")
    del before[name]
    with Checkpointer(tmp_path) as checkpoint:
        checkpoint.save(3, before, persist=True)
        checkpoint.wait()
        with pytest.raises(UsageError, match=said):
            states.resume(checkpoint, now, CheckpointFlags(save=str(tmp_path)), exact=False)


CHANGED: dict[str, dict[str, Any]] = {
    "reduction": {"exact": False},
    "tensor parallel": {"tp": 2}, "sequence parallel": {"tp": 2, "sequence": True},
    "pipeline parallel": {"pp": 2}, "computes in": {"compute": torch.float32},
    "recomputed within compiled blocks": {
        "compile": True, "recompute": Recompute(granularity="selective")
    },
    "fp32 multiplied in": {"compute": torch.float32},
    "compiled": {"compile": True}, "micro-batch size": {"leaf_size": 4},
    "attention kernel": {"attention": "math"}, "optimizer on": {"device": "cuda"},
    "device": {"device": "cuda"}, "threads": {"threads": 3}, "torch": {"version": "2.0"},
}  # fmt: skip
"""By condition, what changes it."""


def conditions(
    *, leaf_size: int = 2, attention: str = "flash", device: str = "cpu", threads: int = 1,
    version: str = "2.13", **layout: Any,
) -> dict[str, Any]:  # fmt: skip
    plan = Plan(sizes=BatchSizes.constant(8), steps=1, leaf_size=leaf_size)
    laid: Any = SimpleNamespace(device=torch.device(device), attention=attention)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
        patch.setattr(torch, "__version__", version)
        torch.set_num_threads(threads)
        try:
            return states.conditions(Layout(**layout), plan, laid)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("name", CHANGED)
def test_what_changes_bits_is_a_condition(name: str) -> None:
    before, now = conditions(), conditions(**CHANGED[name])
    assert before[name] != now[name]
    assert before.keys() == CHANGED.keys(), "each is in the table"


def test_on_a_gpu_it_matters_whether_the_optimizer_steps_there() -> None:
    there, here = (conditions(device="cuda", offload=how) for how in ("optimizer", "all"))
    assert there["optimizer on"] == "cuda" != here["optimizer on"] == conditions()["device"]
    assert there["device"] == here["device"] == "H100"
    assert here["optimizer on"] == f"cpu {torch.backends.cpu.get_cpu_capability()}"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fp32_that_is_multiplied_in_less_is_another_condition(device: str) -> None:
    """As `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE` has it; bf16 is multiplied in bf16 all the same."""
    bf16: dict[str, Any] = {"device": device}
    fp32 = bf16 | {"compute": torch.float32}
    before, same = conditions(**fp32), conditions(**bf16)
    torch.set_float32_matmul_precision("high")
    try:
        found, others = conditions(**fp32), conditions(**bf16)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (before["fp32 multiplied in"], found["fp32 multiplied in"]) == ("ieee", "tf32")
    assert others == same


def test_a_condition_that_one_side_does_not_know_is_none_of_it(tmp_path: Path) -> None:
    """Of another version."""
    before, now = state(""), state("")
    before["conditions"], now["conditions"] = conditions(), conditions()
    before["conditions"]["of before"], now["conditions"]["of later"] = 1, 1
    with Checkpointer(tmp_path) as checkpoint:
        checkpoint.save(3, before, persist=True)
        checkpoint.wait()
        flags = CheckpointFlags(save=str(tmp_path))
        assert states.resume(checkpoint, now, flags, exact=True) == (3, [])


@pytest.mark.parametrize("name", conditions())
def test_an_exact_run_goes_on_under_its_conditions_only(tmp_path: Path, name: str) -> None:
    before, now = state(""), state("")
    before["conditions"], now["conditions"] = conditions(), conditions() | {name: "another"}
    with Checkpointer(tmp_path) as checkpoint:
        checkpoint.save(3, before, persist=True)
        checkpoint.wait()
        with pytest.raises(UsageError, match=f"made with {name} .*, not another"):
            states.resume(checkpoint, now, CheckpointFlags(save=str(tmp_path)), exact=True)
        found = states.resume(checkpoint, now, CheckpointFlags(save=str(tmp_path)), exact=False)
        assert found == (
            3, [f"resumed under other conditions: {name} {before['conditions'][name]} -> another"]
        )  # fmt: skip


def test_ranks_agree_before_the_first_step_or_hear_what_differs(tmp_path: Path) -> None:
    told = forks.told("tests.trainer.run.agreeing", tmp_path, SIZES)
    assert told["alike"] == ["", ""]
    assert len(set(told["other data"])) == 1, "all ranks end with the same line"
    assert told["other data"][0].startswith("data of rank 2 is not that of rank 0")
    assert len(set(told["another processor"])) == 1
    assert told["another processor"][0].startswith("device of rank 1 is not that of rank 0")
    job = {"launch": "", "began": 98_500}
    assert told["another clock"] == [job] * 3, "what replicas save is the same"
    assert told["damage"] == [[3, [2, "on another rank"]], [3, [2, "a bit"]]], "none loads on alone"
    assert told["reports"] == [HEARD] * 3, "in the order of a world of one"
