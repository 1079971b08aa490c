"""`elasticctl generate`, of a checkpoint as two pipeline stages leave it, or two tensor-parallel ranks."""

from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.checkpoint.save import writing
from elastic.checkpoint.state.collect import Place, collect
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import manifest
from elastic.proto.errors import CheckpointError, NotFound, UsageError
from elastic.trainer import checkpoints
from elastic.trainer.checkpoints import identity_of, load_model, opened
from elastic.trainer.convert.commands import hf
from elastic.trainer.data.prepare import learn
from elastic.trainer.data.tokenizers import NullTokenizer
from elastic.trainer.generate import _tokenizer, generate
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from tests.elastic.checkpoint.steps import written
from tests.trainer.telling import Told

CONFIG = GPTConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=384
)


def stage(layers: range) -> GPT:
    part = GPT(CONFIG, layers=layers)
    initialize(part, CONFIG, 1, 0.3)
    return part


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Step 5 of a run of two ranks, each with a block and its end of the model, whose embedding is its head;
    and their optimizers, of which nobody here has need."""
    states = []
    for layers in (range(1), range(1, 2)):
        part = stage(layers)
        adam = torch.optim.AdamW(part.parameters())
        adam.step()
        states.append({"identity": identity_of(CONFIG), "model": part, "optimizer": adam})
    written(tmp_path / "run", 5, states)
    learn(["to be or not to be, that is the question"], 280).save(tmp_path / "run")
    return tmp_path / "run"


def told(*argv: object, json: bool = False) -> Told:
    out = Told(json=json)
    assert generate(out.context, [str(one) for one in argv]) == 0
    return out


def test_the_model_of_two_stages_is_the_whole_one(path: Path) -> None:
    whole, found = stage(range(2)), load_model(opened(str(path)))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert load_model(opened(str(path)), dtype=torch.bfloat16).head.weight.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_so_is_one_that_two_ranks_share_by_the_layer(tmp_path: Path) -> None:
    """Rows of some, columns of others, and one has what both have."""
    whole, storage = stage(range(2)), Folder(tmp_path / "run")
    collected = collect({"identity": identity_of(CONFIG), "model": whole}, Place())
    shards = []
    for rank in range(2):
        pieces, tensors = [], {}
        for name, part in collected.parts.items():
            dim = 1 if name.endswith("output.weight") else 0
            shared = part.tensor.dim() == 2 and "positions" not in name
            if shared:
                mine = part.tensor.chunk(2, dim)[rank]
                offset = tuple(rank * mine.shape[dim] * (d == dim) for d in range(2))
                pieces.append(replace(part.piece, offset=offset, extent=tuple(mine.shape)))
                tensors[name] = partial(torch.clone, mine)
            elif rank == 0:
                pieces.append(part.piece)
                tensors[name] = partial(torch.clone, part.tensor)
        file, values = manifest.file(rank, 2, 0, "job"), collected.values.encode()
        shards.append(writing.write_shard(storage, 3, file, rank, pieces, tensors, values))
    writing.commit(storage, 3, "job", shards)
    found = load_model(opened(str(tmp_path / "run")))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_a_text_goes_on_and_is_the_same_again(path: Path) -> None:
    args = ("--load", path, "--prompt", "to be", "--max-new-tokens", 30, "--seed", 3)
    first = told(*args).out
    assert first.startswith("to be")
    assert len(first) > len("to be\n")
    assert told(*args).out == first
    assert told(*args, "--step", 5, "--device", "cpu", "--dtype", "float32").out == first


def test_several_prompts_and_samples(path: Path) -> None:
    prompts = path.parent / "prompts"
    prompts.write_text("to be\nthat is the question, to be or not\n")
    args = ("--load", path, "--prompts", prompts, "--max-new-tokens", 5, "--num-samples", 2)
    found = told(*args, json=True).documents
    assert [(one["prompt"][:4], one["sample"]) for one in found] == [
        ("to b", 0), ("to b", 1), ("that", 0), ("that", 1),
    ]  # fmt: skip
    assert all(len(one["tokens"]) == 5 or one["ended"] for one in found)
    assert all(token < 280 for one in found for token in one["tokens"])
    alone = told(*args[:2], "--prompt", "to be", "--max-new-tokens", 5, json=True).documents
    assert alone[0] == found[0]
    twice = told(*args[:2], "--prompt", "to be", "--prompt", "or", "--max-new-tokens", 5, json=True)
    assert [one["prompt"] for one in twice.documents] == ["to be", "or"]
    plain = told(*args)
    assert plain.out.count("=== ") == 4
    assert "prompt 3 has " in plain.notes[0]
    assert "the model sees the last 8" in plain.notes[0]


def test_the_exported_model_writes_the_same(path: Path) -> None:
    export = Told()
    assert hf(export.context, ["export", str(path), str(path.parent / "hf")]) == 0
    assert "step 5, " in export.out
    args = ("--prompt", "to be", "--max-new-tokens", 20, "--temperature", 0)
    ours = told("--load", path, *args).out
    assert told("--load", path.parent / "hf", *args).out == ours
    back = Told(json=True)
    argv = ["import", str(path.parent / "hf"), str(path.parent / "back"), "--step", "9"]
    assert hf(back.context, argv) == 0
    assert "padded to 384" in back.documents[0]["message"]
    assert told("--load", path.parent / "back", *args).out == ours
    before, after = opened(str(path)), opened(str(path.parent / "back"), 9)
    for name, _ in stage(range(2)).named_parameters():
        words = 280 if name == "embedding.words.weight" else None  # the rest only pads
        assert torch.equal(before.tensor(name)[:words], after.tensor(name)[:words]), name
    with pytest.raises(CheckpointError, match="is there already"):
        hf(export.context, ["export", str(path), str(path.parent / "hf")])


def test_a_model_of_bare_ids_is_exported_with_what_generate_reads(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    NullTokenizer(words=300).save(path)
    export = Told()
    assert hf(export.context, ["export", str(path), str(path.parent / "hf")]) == 0
    assert "words: 301" in export.out
    assert export.notes == [
        "NullTokenizer is known to elasticctl generate alone: transformers has none such"
    ]
    args = ("--prompt", "5 6 7", "--max-new-tokens", 4, "--temperature", 0)
    assert told("--load", path.parent / "hf", *args).out == told("--load", path, *args).out
    (path / "tokenizer_config.json").unlink()
    assert hf(export.context, ["export", str(path), str(path.parent / "bare")]) == 0
    assert f"{path} has no tokenizer: without one" in export.notes[-1]


def test_a_folder_as_a_url_is_a_folder(path: Path) -> None:
    args = ("--prompt", "to be", "--max-new-tokens", 4, "--temperature", 0)
    ours = told("--load", path, *args).out
    assert told("--load", f"file://{path}", *args).out == ours
    theirs, back = path.parent / "hf", path.parent / "new" / "back"
    for argv in (
        ["export", f"file://{path}", str(theirs)],
        ["import", str(theirs), f"file://{back}"],
    ):
        out = Told()
        assert hf(out.context, argv) == 0
        assert out.notes == []
    for one in (theirs, f"file://{theirs}", back):
        assert told("--load", one, *args).out == ours
    with pytest.raises(UsageError, match=r"^memory://x is no folder: give --tokenizer"):
        _tokenizer(Namespace(load="memory://x", tokenizer=None))


def test_an_import_that_is_killed_leaves_no_model_without_a_tokenizer(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = theirs.parent / "back"

    def save(path: str, *_: object, **__: object) -> None:
        assert (Path(path) / "tokenizer.json").exists()

    monkeypatch.setattr(checkpoints, "save_model", save)
    assert hf(Told().context, ["import", str(theirs), str(back)]) == 0


def test_words_that_the_tokenizer_has_are_not_cut_off(path: Path) -> None:
    argv = ["export", str(path), str(path.parent / "hf"), "--vocab-size"]
    with pytest.raises(UsageError, match=r"--vocab-size 279 would cut words off .*: it has 280"):
        hf(Told().context, [*argv, "279"])
    assert not (path.parent / "hf").exists()
    assert hf(Told().context, [*argv, "280"]) == 0


@pytest.fixture
def theirs(path: Path) -> Path:
    """The model as a folder of Hugging Face's."""
    assert hf(Told().context, ["export", str(path), str(path.parent / "hf")]) == 0
    return path.parent / "hf"


def test_a_model_is_imported_into_a_folder_of_its_own(path: Path, theirs: Path) -> None:
    """In a run's it would be the newest step, from which the run cannot go on."""
    words = (path / "tokenizer.json").read_bytes()
    (theirs / "model.safetensors").write_bytes(b"not looked at")
    with pytest.raises(CheckpointError, match="is there already: name a folder that is not"):
        hf(Told().context, ["import", str(theirs), str(path)])
    assert (path / "tokenizer.json").read_bytes() == words
    assert not (path / manifest.folder(1)).exists()


def test_nor_is_one_imported_over_what_lies_behind_a_url(theirs: Path) -> None:
    argv = ["import", str(theirs), "memory://f4-import/run"]
    assert hf(Told().context, [*argv, "--step", "3"]) == 0
    with pytest.raises(CheckpointError, match="holds a checkpoint already: name another place"):
        hf(Told().context, argv)


def test_a_tokenizer_that_is_none_is_not_imported(theirs: Path) -> None:
    (theirs / "tokenizer.json").write_text("garbage")
    with pytest.raises(UsageError, match=r"tokenizer\.json is no tokenizer of Hugging Face's"):
        hf(Told().context, ["import", str(theirs), str(theirs.parent / "back")])
    assert not (theirs.parent / "back").exists()


def test_a_damaged_step_is_not_passed_over_without_a_word(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether text is wanted of it or a folder of Hugging Face's."""
    (path / manifest.folder(8)).mkdir()
    (path / manifest.folder(8) / manifest.NAME).write_text("{")
    told("--load", path, "--prompt", "x", "--max-new-tokens", 1)
    assert "run: step 8 is damaged, and step 5 is taken: " in caplog.text
    caplog.clear()
    assert hf(Told().context, ["export", str(path), str(path.parent / "hf")]) == 0
    assert "run: step 8 is damaged, and step 5 is taken: " in caplog.text
    caplog.clear()
    told("--load", path, "--prompt", "x", "--max-new-tokens", 1, "--step", 5)
    assert caplog.text == ""


def test_what_is_missing_is_one_line(path: Path) -> None:
    prompt = ("--prompt", "x")
    with pytest.raises(NotFound, match="is not there"):
        told("--load", path / "nothing", *prompt)
    (path.parent / "empty").mkdir()
    with pytest.raises(NotFound, match="holds no checkpoint"):
        told("--load", path.parent / "empty", *prompt)
    with pytest.raises(NotFound, match="has no step 4"):
        told("--load", path, "--step", 4, *prompt)
    written(path.parent / "other", 1, [{"model": torch.nn.Linear(2, 2)}])
    with pytest.raises(CheckpointError, match=r"is no checkpoint of elastic\.trainer"):
        told("--load", path.parent / "other", *prompt)
    with pytest.raises(UsageError, match="--device nowhere"):
        told("--load", path, "--device", "nowhere", *prompt)
    (path / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"read .*tokenizer\.json: .*elsewhere, give --tokenizer$"):
        told("--load", path, *prompt)
    with pytest.raises(UsageError, match=r"read .*tokenizer\.json: No such file or directory$"):
        told("--load", path, "--tokenizer", path.parent / "empty", *prompt)
    learn([str(n) for n in range(2000)], 400).save(path)
    with pytest.raises(UsageError, match="another model's"):
        told("--load", path, *prompt)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda *_: torch.empty(2**50), UsageError, "does not fit on cpu in torch.float32: give another"),
        (lambda *_: torch.ones(2).view(3), RuntimeError, "is invalid for input of size 2"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, error: type[Exception], said: str
) -> None:
    monkeypatch.setattr("elastic.trainer.checkpoints.load_model", call)
    with pytest.raises(error, match=said):
        told("--load", path, "--prompt", "x", "--device", "cpu")


@pytest.mark.parametrize(
    "argv",
    [[], ["--load", "x"], ["--load", "x", "--prompt", "a", "--prompts", "b"],
     *(["--load", "x", "--prompt", "a", flag, value] for flag, value in (
         ("--max-new-tokens", "0"), ("--num-samples", "0"), ("--temperature", "-1"),
         ("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "x"),
         ("--top-k", "-1"), ("--top-p", "0"), ("--top-p", "1.1"), ("--seed", "-1"),
         ("--seed", str(2**63)),
     ))],
)  # fmt: skip
def test_usage(argv: list[str]) -> None:
    """Told at once: not once torch is imported and the model is there."""
    with pytest.raises(SystemExit) as ended:
        generate(Told().context, argv)
    assert ended.value.code == 2
