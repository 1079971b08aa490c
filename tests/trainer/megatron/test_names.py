"""Megatron's names: what is here, and what is said of the rest."""

import contextlib
import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer import current as runs
from elastic.trainer.arguments.namespace import namespace
from elastic.trainer.arguments.parse import parse
from elastic.trainer.current import Current
from elastic.trainer.data import tokenizers
from elastic.trainer.data.gpt_dataset import datasets
from elastic.trainer.data.indexed import write
from elastic.trainer.data.items import Form
from elastic.trainer.data.splits import Splits
from elastic.trainer.megatron import absent
from elastic.trainer.megatron.core import mpu, tensor_parallel
from elastic.trainer.megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from elastic.trainer.megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from elastic.trainer.megatron.core.models.gpt import GPTModel
from elastic.trainer.megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from elastic.trainer.megatron.data.gpt_dataset import build_train_valid_test_datasets
from elastic.trainer.megatron.training import inprocess_restart, pretrain
from elastic.trainer.megatron.training.arguments import core_transformer_config_from_args
from elastic.trainer.megatron.training.utils import (
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    get_ltor_masks_and_position_ids,
)
from elastic.trainer.model.tensor_parallel import TensorParallel
from elastic.trainer.parallel.layout import Part
from elastic.trainer.pretrain import check_embeddings, get_args
from elastic.trainer.watch.timers import Timers
from tests.trainer.arguments.test_effects import BASE

ROOT = Path(__file__).parents[3]
PACKAGE = "elastic.trainer.megatron"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Current]:
    """A run of a world of one, as `pretrain` has it when it makes the model."""

    def made(*flags: str, world_size: int = 1) -> Current:
        settings = parse(f"{BASE} --vocab-size 100 {' '.join(flags)}".split())
        words = tokenizers.build(settings.tokenizer)
        config = settings.config(vocab_size=128)
        args = namespace(settings, world_size=world_size, rank=0, padded_vocab_size=128)
        part = Part(tp=TensorParallel(), layers=range(4), first=True, last=True)
        found = Current(
            settings=settings, tokenizer=words, config=config, args=args, timers=Timers(), part=part
        )
        monkeypatch.setattr(runs, "_current", found)
        return found

    return made


def test_pretrain_has_its_parameters_in_megatrons_order() -> None:
    assert list(inspect.signature(pretrain).parameters) == [
        "train_valid_test_dataset_provider", "model_provider", "model_type", "forward_step_func",
        "process_non_loss_data_func", "extra_args_provider", "args_defaults", "get_embedding_ranks",
        "get_position_embedding_ranks", "non_loss_data_func",
    ]  # fmt: skip


def documented() -> list[tuple[str, str]]:
    """Modules and names of the page's table."""
    page = (ROOT / "docs" / "trainer-megatron.md").read_text()
    rows = re.findall(r"(?m)^\| `megatron(?:\.([\w.]+))?` \| (.*) \|$", page)
    return [(module, name) for module, names in rows for name in re.findall(r"`(\w+)`", names)]


def test_every_name_that_the_page_lists_is_there() -> None:
    found = documented()
    assert len(found) > 60
    for module, name in found:
        assert hasattr(importlib.import_module(f"{PACKAGE}.{module}".rstrip(".")), name), (
            module,
            name,
        )


# --- what is not here ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("core.tokenizers.utils.build_tokenizer", "build_tokenizer"),
        ("core.transformer.spec_utils", "import_module"),
        ("core.utils", "get_thd_batch_on_this_cp_rank"),
        ("core.models.mamba", "MambaModel"),
        ("core.models.gpt.gpt_layer_specs", "get_gpt_mtp_block_spec"),
        ("core.tokenizers.text.utils.build_tokenizer", "build_tokenizer"),
        ("legacy.model", "GPTModel"),
    ],
)
def test_what_a_script_imports_and_never_uses_may_be_imported(module: str, name: str) -> None:
    found = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    assert GPTModel | found  # in an annotation
    with pytest.raises(UsageError, match=rf"^megatron\.{module}\.{name} is not here: \w"):
        found(1, two=2)
    with pytest.raises(UsageError, match="is not here"):
        type("Own", (found,), {})


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("from megatron.core.export import x", "megatron.core.export is not here: docs/"),
        (
            "from megatron.core.utils import x",
            "megatron.core.utils does not have all of what is imp",
        ),
        ("from megatron.core import export", "megatron.core does not have all of what is imported"),
        ("from megatron.legacy.model import x", "megatron.legacy.model does not have all of what"),
        ("from megatron.training import get_args; get_args()", "there is no run yet: only what"),
    ],
)
def test_what_nobody_catches_is_one_line(
    statement: str,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "_current", None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    # A process group that an earlier test made has torch put the rank before each line, for good.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    absent.install()
    script = tmp_path / "script.py"
    script.write_text(statement.replace("megatron", PACKAGE, 1))
    try:
        runpy.run_path(str(script))
    except (ImportError, UsageError):
        sys.excepthook(*sys.exc_info())
    else:
        raise AssertionError(f"{statement} has worked")
    told = capsys.readouterr().err
    assert told.startswith(line)
    assert told.count("\n") == 1


def test_a_script_may_ask_whether_something_is_there() -> None:
    assert not hasattr(mpu, "get_expert_model_parallel_group")
    with pytest.raises(UsageError, match=r"parallel_state\.get_expert_model_parallel_group is not"):
        _ = mpu.get_expert_model_parallel_group


def test_an_argument_that_there_is_not_is_a_line_too(run: Callable[..., Current]) -> None:
    args = run("--mock-data").args
    assert getattr(args, "modelopt_enabled", False) is False
    with pytest.raises(UsageError, match=r"get_args\(\)\.moe_router_topk: .* experts comes later"):
        _ = args.moe_router_topk
    with pytest.raises(UsageError, match="did you mean --hidden-size"):
        _ = args.hiden_size


# --- the model -----------------------------------------------------------------------------------


def test_the_model_is_the_runs(run: Callable[..., Current]) -> None:
    found = run("--mock-data", "--swiglu", "--position-embedding-type rope")
    config = core_transformer_config_from_args(found.args)
    model = GPTModel(
        config, get_gpt_layer_local_spec(None, False, False), vocab_size=128, rotary_base=10000,
        position_embedding_type="rope", pre_process=True, vp_stage=None,
    )  # fmt: skip
    assert model.config == found.config
    assert sum(one.numel() for one in model.parameters()) == found.config.parameter_count


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"vocab_size": 100}, "vocab_size is 100, and 128 by the run's arguments"),
        ({"mtp_block_spec": "spec"}, "mtp_block_spec is spec, and None"),
        ({"post_process": False}, "post_process is False, and True"),
        ({"hidden": 3}, "GPTModel takes no hidden here"),
    ],
)
def test_another_model_is_refused(
    said: dict[str, Any], message: str, run: Callable[..., Current]
) -> None:
    config = core_transformer_config_from_args(run("--mock-data").args)
    with pytest.raises(UsageError, match=message):
        GPTModel(config, **said)


def test_a_shape_that_a_script_changes_is_refused(run: Callable[..., Current]) -> None:
    found = run("--mock-data")
    config = core_transformer_config_from_args(found.args)
    config.num_layers = 2
    with pytest.raises(UsageError, match="num_layers is 2, and 4 by the run's"):
        GPTModel(config)
    assert found.args.num_layers == 4


def test_layers_of_another_kind_are_refused() -> None:
    with pytest.raises(UsageError, match="num_experts is not here"):
        get_gpt_layer_local_spec(num_experts=8)
    with pytest.raises(UsageError, match="use_kitchen is not here"):
        get_gpt_layer_local_spec(None, use_kitchen=True)


# --- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "--mock-data",
        "--data-path a --split 8,1,1 --eod-mask-loss",
        "--data-path a b --data-cache-path c",
        "--data-path 0.3 a 0.7 b --reset-position-ids",
        "--train-data-path 1 a 2 b --valid-data-path c d --multiple-validation-sets",
    ],
)
def test_a_configuration_is_what_the_command_line_says(
    flags: str, run: Callable[..., Current]
) -> None:
    found = run(flags)
    args = found.args
    blend, each = get_blend_and_blend_per_split(args)
    common = {
        "sequence_length": args.seq_length, "random_seed": args.seed, "split": args.split,
        "path_to_cache": args.data_cache_path, "eod_mask_loss": args.eod_mask_loss,
        "reset_position_ids": args.reset_position_ids,
        "multiple_validation_sets": args.multiple_validation_sets,
    }  # fmt: skip
    config = GPTDatasetConfig(blend=blend, blend_per_split=each, **common)
    wanted = found.settings.data
    words = [
        tuple(one if one.isalpha() else str(float(one)) for one in values)
        for values in (wanted.data_path, wanted.train_data_path)
    ]  # a weight comes back as a number
    assert config.flags == replace(wanted, data_path=words[0], train_data_path=words[1])
    assert config.tokenizer is found.tokenizer
    split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    older = GPTDatasetConfig(blend=args.data_path, blend_per_split=split, **common)
    assert older.flags == wanted


def test_datasets_are_made_as_until_2023_too(run: Callable[..., Current], tmp_path: Path) -> None:
    with write(tmp_path / "text", np.dtype("<u2")) as writer:
        for number in range(20):
            writer.add_document([np.arange(40) + number])
    found = run(f"--data-path {tmp_path / 'text'} --split 1,1,0 --eod-mask-loss")
    args, numbers = found.args, [5, 3, 0]
    made = build_train_valid_test_datasets(
        args.data_path, args.data_impl, args.split, numbers, args.seq_length, args.seed,
        not args.mmap_warmup, data_cache_path=args.data_cache_path,
        train_doc_idx_path=args.train_doc_idx_path,
    )  # fmt: skip
    assert made == datasets(found.settings.data, found.tokenizer, Splits(*numbers))
    assert isinstance(made[0], GPTDataset)
    assert made[2] is None


def test_data_of_another_kind_are_refused(run: Callable[..., Current]) -> None:
    run("--mock-data")
    with pytest.raises(UsageError, match="sequence_length 7 is not --seq-length 32"):
        GPTDatasetConfig(sequence_length=7, random_seed=1)
    with pytest.raises(UsageError, match="reset_attention_mask True is not here"):
        GPTDatasetConfig(sequence_length=32, random_seed=1, reset_attention_mask=True)
    config = GPTDatasetConfig(sequence_length=32, random_seed=1, num_dataset_builder_threads=3)
    own = type("Own", (GPTDataset,), {})
    with pytest.raises(UsageError, match="not Own: return datasets of your own"):
        BlendedMegatronDatasetBuilder(own, [1, 1, 1], None, config)
    train, valid, test = BlendedMegatronDatasetBuilder(GPTDataset, [3, 2, 0], None, config).build()
    assert (len(train), len(valid), test) == (3, 2, None)


LEAF = {
    "tokens": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[6, 7, 8]]),
    "loss_mask": torch.ones(1, 3), "position_ids": torch.arange(3).view(1, 3),
    "dataset_id": torch.zeros(1, dtype=torch.int64),
}  # fmt: skip


def test_a_leaf_has_megatrons_order(run: Callable[..., Current]) -> None:
    run("--mock-data")
    tokens, labels, mask, attention_mask, positions = get_batch_on_this_tp_rank(
        iter([LEAF])
    ).values()
    assert (tokens, labels, mask) == (LEAF["tokens"], LEAF["labels"], LEAF["loss_mask"])
    assert (attention_mask, positions) == (None, None)
    run("--mock-data --reset-position-ids")
    assert get_batch_on_this_tp_rank(iter([LEAF]))["position_ids"] is LEAF["position_ids"]


def test_text_is_a_leaf_as_it_was_until_2023(run: Callable[..., Current]) -> None:
    run("--mock-data")
    found = tensor_parallel.broadcast_data(["text"], LEAF, torch.int64)
    assert found["text"].tolist() == [[5, 6, 7, 8]]
    with pytest.raises(UsageError, match="samples have no types, they have tokens, labels"):
        tensor_parallel.broadcast_data(["types"], LEAF, torch.int64)
    run("--mock-data --full-validation")
    with pytest.raises(UsageError, match="take get_batch_on_this_tp_rank"):
        tensor_parallel.broadcast_data(["text"], LEAF, torch.int64)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=12), st.booleans(), st.booleans())
def test_masks_and_positions_of_tokens_are_those_of_a_sample(
    text: list[int], reset: bool, mask: bool
) -> None:
    form = Form(vocab_size=3, eod=0, eod_mask_loss=mask, reset_position_ids=reset)
    item = form.item(np.array(text), 0, "")
    tokens = torch.from_numpy(item["tokens"]).unsqueeze(0)
    _, found, positions = get_ltor_masks_and_position_ids(tokens, 0, reset, False, mask)
    assert found[0].tolist() == item["loss_mask"].tolist()
    if positions is None:
        assert not reset
    else:
        assert positions[0].tolist() == item["position_ids"].tolist()


# --- pretrain ------------------------------------------------------------------------------------


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **said: Any
) -> str:
    """What `pretrain` says before anything is started."""
    line = f"x {BASE} --mock-data --vocab-size 100 --pipeline-model-parallel-size 4 --tensorboard-dir t"
    monkeypatch.setattr(sys, "argv", line.split())
    started, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    with pytest.raises(SystemExit, match="2"):
        started(_never, _never, None, _never, store=store, **said)
    return capsys.readouterr().err


def _never(*_: Any) -> Any:
    raise AssertionError("nothing is started")


@pytest.mark.parametrize(
    ("flag", "words", "places", "wanted"),
    [
        ("", "03", "0", ""),
        ("", "0", "0", r"get_embedding_ranks: of pipeline ranks \[0, 1, 2, 3\] it wants \[0\] to have an"),
        (UNTIED, "0", "0", ""),
        (UNTIED, "03", "0", ""),
        (UNTIED, "01", "0", r"get_embedding_ranks: .* it wants \[0, 1\] .* and here \[0\] have: leave"),
        ("", "03", "01", r"get_position_embedding_ranks: .* it wants \[0, 1\] .* and here \[0\] have"),
    ],
)  # fmt: skip
def test_embeddings_are_on_the_ranks_that_they_are_on(
    flag: str, words: str, places: str, wanted: str, run: Callable[..., Current]
) -> None:
    found = run("--mock-data --pipeline-model-parallel-size 4", flag, world_size=4)

    def ranks(which: str) -> Callable[[list[int]], list[int]]:
        def function(pipeline: list[int]) -> list[int]:
            assert get_args() is found.args, "it may ask for the run"
            return [pipeline[int(one)] for one in which]

        return function

    with pytest.raises(UsageError, match=wanted) if wanted else contextlib.nullcontext():
        check_embeddings(ranks(words), ranks(places))


def test_a_pipelines_other_data_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(monkeypatch, capsys, process_non_loss_data_func=_never)
    assert "give non_loss_data_func, too" in told
