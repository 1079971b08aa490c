"""`elasticctl ckpt`: what it says of sound and damaged steps, and what it makes of them."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from elastic.checkpoint.dcp import StorageReader
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from elastic.checkpoint.tools import convert, foreign, inspection
from elastic.proto import manifest
from elastic.proto.errors import CheckpointError
from tests.elastic.asking import Ask, columns
from tests.elastic.checkpoint.steps import flip, written
from tests.full_disk import files_of_at_most

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def states() -> list[dict[str, Any]]:
    """Two ranks' that are equal but for `n` and `own`; two tensors share memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    model[1].weight = model[0].weight
    return [
        {"model": model, "n": rank, "lr": 0.5, "own": torch.full((2,), rank)} for rank in range(2)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint with step 7."""
    written(tmp_path / "run", 7, states())
    return tmp_path / "run"


def shard(path: Path, rank: int) -> Path:
    return path / manifest.folder(7) / manifest.file(rank, 2, 3, "job")


# --- ls and show ---------------------------------------------------------------------------------


def test_ls(path: Path, ask: Ask) -> None:
    written(path, 9, states()[:1])
    (path / manifest.folder(11)).mkdir()
    damaged = written(path, 10, states()[:1])
    (damaged / manifest.NAME).write_text("{")
    (path / "notes").mkdir()
    told = json.loads((path / manifest.folder(9) / manifest.NAME).read_text())
    (path / manifest.folder(9) / manifest.NAME).write_text(json.dumps(told | {"sequence": 2}))
    answer = ask("ckpt", "ls", path)
    head, *rows = map(columns, answer.lines)
    assert (answer.code, head[:3], head[-1]) == (0, ["STEP", "SEQUENCE", "WORLD"], "COMMITTED")
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("7", "1", "2", "yes"), ("9", "2", "1", "newest"),
        ("10", "-", "-", "damaged"), ("11", "-", "-", "no"),
    ]  # fmt: skip
    assert "step 10: the manifest is damaged" in answer.err
    document = json.loads(ask("-o", "json", "ckpt", "ls", path).out)
    assert [step["committed"] for step in document["steps"]] == [True, True, False, False]
    assert [step["newest"] for step in document["steps"]] == [False, True, False, False]
    assert document["steps"][0]["bytes"] == sum(shard(path, rank).stat().st_size for rank in (0, 1))


def test_show(path: Path, ask: Ask) -> None:
    answer = ask("ckpt", "show", path)
    rows = [columns(line) for line in answer.lines]
    assert answer.code == 0
    assert ["model.0.weight", "float32", "[4,", "3]", "0-1", "48B"] in rows
    assert ["own", "int64", "[2]", "0-1", "16B"] in rows
    assert ["lr", "0-1", "0.5"] in rows
    assert ["n", "0", "0"] in rows
    assert ["n", "1", "1"] in rows
    assert [row[-2:] for row in rows if row[:1] == ["model.1.weight"]] == [["is", "model.0.weight"]]
    document = json.loads(ask("-o", "json", "ckpt", "show", path, "--step", "7").out)
    assert {tensor["name"] for tensor in document["tensors"]} == {
        "own", "model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias",
    }  # fmt: skip


def test_show_says_how_much_is_what_and_what_is_under_a_name(path: Path, ask: Ask) -> None:
    lines = ask("ckpt", "show", path).lines
    assert columns(lines[3]) == ["PART", "TENSORS", "ELEMENTS", "BYTES"]
    assert columns(lines[4]) == ["model", "3", "20", "80B"]  # the second weight is the first
    assert columns(lines[5]) == ["own", "1", "2", "16B"]
    only = ask("ckpt", "show", path, "--only", "model.0")
    assert "model.0.bias" in only.out
    assert "model.1" not in only.out
    assert "own" not in only.out
    missing = ask("ckpt", "show", path, "--only", "mode")
    assert (missing.code, missing.err.count("\n")) == (1, 1)
    assert "has nothing under mode" in missing.err


def test_show_goes_on_without_a_file(path: Path, ask: Ask) -> None:
    shard(path, 0).unlink()
    answer = ask("ckpt", "show", path)
    assert answer.code == 1
    assert f"{shard(path, 0)}: No such file or directory" in answer.err
    assert "own" in answer.out


def test_no_torch_is_imported(path: Path) -> None:
    code = (
        "import sys; from elastic import ctl\n"
        "for verb in ('ls', 'show', 'verify'):\n"
        "    assert ctl.main(['ckpt', verb, sys.argv[1]]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True)


def test_mistakes_get_one_line(path: Path, tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "empty").mkdir()
    (path / manifest.folder(8)).mkdir()
    for args, code, what in (
        (("ls", tmp_path / "no"), 1, "is not there"),
        (("ls", tmp_path / "empty"), 1, "holds no checkpoint"),
        (("show", path / manifest.folder(7)), 1, "is one step: give"),
        (("show", path, "--step", "12"), 1, "has no step 12"),
        (("verify", path, "--step", "8"), 1, "step 8 in .* is not committed"),
        (("verify", path, "--step", "x"), 2, "no number"),
        (("ls", ""), 2, "it is empty"),
        (("convert", path, tmp_path / "x"), 2, "--to"),
        (("convert", path, tmp_path / "x", "--to", "elastic"), 2, "say which, --step N"),
        (
            ("convert", path, tmp_path / "x", "--to", "elastic", "--step", "1"),
            1,
            "no checkpoint of",
        ),
        (("convert", path, tmp_path / "x", "--to", "dcp", "--only", "a"), 2, "--only goes with"),
        (("convert", path, path, "--to", "dcp"), 1, "is there already"),
        (("convert", path, tmp_path / "x", "--to", "safetensors", "--only", "a"), 1, "under a"),
    ):
        answer = ask("ckpt", *args)
        assert answer.code == code, (args, answer)
        assert "Traceback" not in answer.err
        assert code == 2 or len(answer.err.splitlines()) == 1
        assert re.search(what, answer.err), (args, answer.err)
    assert not (tmp_path / "x").exists()


def test_a_step_whose_manifest_is_damaged_is_not_passed_over_without_a_word(
    path: Path, tmp_path: Path, ask: Ask
) -> None:
    """`verify` of the newest is that of the newest by name: all is well is not what it says then."""
    damage = path / manifest.folder(9) / manifest.NAME
    damage.parent.mkdir()
    damage.write_text("{")
    said = f"{path}: step 9 is damaged, and step 7 is taken: "
    asked: list[tuple[tuple[Any, ...], int]] = [
        (("verify", path), 1),
        (("show", path), 0),
        (("convert", path, tmp_path / "dcp", "--to", "dcp"), 0),
    ]
    for args, code in asked:
        answer = ask("ckpt", *args)
        assert (answer.code, answer.err.count(said)) == (code, 1), (args, answer)
    document = json.loads(ask("ckpt", "verify", path, "-o", "json").out)
    assert [one.startswith(said) for one in document["passed_over"]] == [True]
    for verb in ("verify", "show"):
        answer = ask("ckpt", verb, path, "--step", "7")
        assert (answer.code, answer.err) == (0, "")
    damage.rename(damage.with_name("manifest.draft"))  # which a crash leaves, and is no step
    assert ask("ckpt", "verify", path).code == 0


# --- verify --------------------------------------------------------------------------------------


def swap(path: Path) -> None:
    first, second = shard(path, 0), shard(path, 1)
    first.rename(path / "x")
    second.rename(first)
    (path / "x").rename(second)


def stale(path: Path) -> None:
    state = states()[1] | {"n": 5}
    written(path / "other", 7, [states()[0], state])
    shutil.copy(shard(path / "other", 1), shard(path, 1))
    shutil.rmtree(path / "other")


def folder_instead(path: Path) -> None:
    shard(path, 1).unlink()
    shard(path, 1).mkdir()


def header(path: Path) -> None:
    data = bytearray(shard(path, 1).read_bytes())
    data[8 + data[8:].index(b"elastic")] ^= 1  # in the metadata's key
    shard(path, 1).write_bytes(data)


def spaces(path: Path) -> None:
    data = bytearray(shard(path, 1).read_bytes())
    data[int.from_bytes(data[:8], "little")] = 9  # a tab for the last space: JSON all the same
    shard(path, 1).write_bytes(data)


def both(path: Path) -> None:
    for rank in (0, 1):
        flip(shard(path, rank), "own")


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda path: flip(shard(path, 1), "own"), [(1, "own", "not those that were written")]),
        (
            both,
            [(0, "own", "not those"), (1, "own", "not those")],
        ),
        (lambda path: flip(shard(path, 1), "elastic.values"), [(1, "the values", "not those")]),
        (lambda path: flip(shard(path, 1), "elastic.sums"), [(1, "", "table of checksums is not")]),
        (header, [(1, "", "no shard of a checkpoint")]),
        (spaces, [(1, "the header", "not those that were written")]),
        (lambda path: os.truncate(shard(path, 1), 4100), [(1, "", "4100 bytes, .* were written")]),
        (lambda path: os.truncate(shard(path, 1), 9999), [(1, "", "9999 bytes")]),
        (lambda path: shard(path, 1).unlink(), [(1, "", "No such file")]),
        (folder_instead, [(1, "", "has .* bytes|directory")]),
        (swap, [(0, "", "table|bytes"), (1, "", "table|bytes")]),
        (stale, [(1, "", "table|bytes")]),
    ],
    ids=[
        "tensor", "two", "values", "table", "header", "spaces", "truncated", "longer", "missing",
        "folder", "swapped", "stale",
    ],
)  # fmt: skip
def test_damage_is_named(
    path: Path, ask: Ask, spoil: Callable[[Path], None], found: list[tuple[int, str, str]]
) -> None:
    assert ask("ckpt", "verify", path).code == 0
    spoil(path)
    answer = ask("-o", "json", "ckpt", "verify", path)
    assert answer.code == 1
    damaged = json.loads(answer.out)["damaged"]
    assert [(one["file"], one["what"]) for one in damaged] == [
        (shard(path, rank).name, what) for rank, what, _ in found
    ]
    for one, (_, _, problem) in zip(damaged, found, strict=True):
        assert re.search(problem, one["problem"])
    table = ask("ckpt", "verify", path)
    assert table.code == 1
    assert columns(table.lines[0]) == ["FILE", "WHAT", "PROBLEM"]
    assert len(table.lines) == 1 + len(found)


def test_a_later_chunk_of_a_large_tensor(tmp_path: Path) -> None:
    written(tmp_path, 7, [{"w": torch.zeros(5 << 20), "v": torch.ones(3)}])  # 20 MiB: 3 chunks
    file = tmp_path / manifest.folder(7) / manifest.file(0, 1, 3, "job")
    told = manifests.read(Folder(Path(tmp_path)), 7)
    assert inspection.verify(Folder(tmp_path), told) == []
    start = 4096
    with open(file, "r+b") as opened:
        opened.seek(start + (17 << 20))
        opened.write(b"x")
    (damage,) = inspection.verify(Folder(tmp_path), told)
    assert (damage.file, damage.what) == (file.name, "w")
    assert damage.problem.endswith(f"from byte {start + (16 << 20)} on")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(at=st.integers(0, 10**4), bit=st.integers(0, 7))
def test_no_flipped_bit_is_missed(path: Path, at: int, bit: int) -> None:
    file = shard(path, 1)
    sound = file.read_bytes()
    data = bytearray(sound)
    data[at % len(sound)] ^= 1 << bit
    file.write_bytes(data)
    damaged = inspection.verify(Folder(path), manifests.read(Folder(path), 7))
    file.write_bytes(sound)
    assert {one.file for one in damaged} == {file.name}


# --- to safetensors ------------------------------------------------------------------------------


def opened(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """By safetensors' own reader, through the index; and what the files say beside."""
    index = json.loads((folder / convert.INDEX).read_text())
    found: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as one:
            found[name] = one.get_tensor(name)
            metadata |= one.metadata()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found, metadata


def test_a_set_of_safetensors(
    path: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "FILE", 60)
    answer = ask("ckpt", "convert", path, tmp_path / "hf", "--to", "safetensors")
    assert (answer.code, answer.err) == (0, "")
    names = sorted(file.name for file in (tmp_path / "hf").glob("*.safetensors"))
    assert names == [
        f"model-0000{n}-of-0000{len(names)}.safetensors" for n in range(1, len(names) + 1)
    ]
    assert len(names) > 1
    found, metadata = opened(tmp_path / "hf")
    model = states()[0]["model"].state_dict()
    assert found.keys() == {"model.0.weight", "model.0.bias", "model.1.bias", "own"}
    assert all(torch.equal(found[n], model[n[6:]]) for n in found if n != "own")
    assert metadata == {"format": "pt", "model.1.weight": "model.0.weight"}


def test_one_part_of_the_state(path: Path, tmp_path: Path, ask: Ask) -> None:
    assert ask(
        "ckpt", "convert", path, tmp_path / "hf", "--to", "safetensors", "--only", "model"
    ).code == 0  # fmt: skip
    found, metadata = opened(tmp_path / "hf")
    assert found.keys() == {"0.weight", "0.bias", "1.bias"}
    assert metadata["1.weight"] == "0.weight"


def test_what_safetensors_does_not_have(tmp_path: Path, ask: Ask) -> None:
    written(tmp_path / "run", 7, [{"z": torch.ones(2, dtype=torch.complex128)}])
    answer = ask("ckpt", "convert", tmp_path / "run", tmp_path / "hf", "--to", "safetensors")
    assert (answer.code, answer.err) == (
        1, "elasticctl: z is of complex128, which safetensors does not have\n",
    )  # fmt: skip


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_damage_is_not_converted(path: Path, tmp_path: Path, ask: Ask, to: str) -> None:
    dest = tmp_path / "dest"
    gone = next(path.glob("step-00000007/shard-00001*"))
    aside = gone.rename(tmp_path / "aside")
    answer = ask("ckpt", "convert", path, dest, "--to", to)
    assert answer.code == 1
    assert f"{gone}: No such file or directory\n" in answer.err, "what only it has is not known"
    aside.rename(gone)
    both(path)
    (tmp_path / "real").mkdir()
    dest.symlink_to("real")
    answer = ask("ckpt", "convert", path, dest, "--to", to)
    assert answer.code == 1
    assert "own is damaged, and there is no other copy" in answer.err
    assert "Traceback" not in answer.err
    assert not any(dest.iterdir()), "it was there before, and stays"


@pytest.mark.parametrize(
    "state",
    [{"1": torch.ones(1), 1: torch.zeros(1)}, {"d.0": torch.ones(1), "d": [torch.zeros(1)]}],
    ids=["text and number", "a list"],
)
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_two_values_of_one_name_in_dcp_are_refused(
    tmp_path: Path, ask: Ask, state: dict[Any, Any], to: str
) -> None:
    written(tmp_path / "run", 7, [{"s": state}])
    answer = ask("ckpt", "convert", tmp_path / "run", tmp_path / "made", "--to", to)
    assert answer.code == 1
    assert re.search(r"two values would be called s\.(1|d\.0) in DCP: name one", answer.err)
    assert not (tmp_path / "made").exists()


def test_names_that_safetensors_has_a_use_of_its_own_for(tmp_path: Path, ask: Ask) -> None:
    shared = torch.ones(2)
    written(tmp_path / "run", 7, [{"a": shared, "format": shared, "b": {"c": torch.ones(1)}}])
    hf = tmp_path / "hf"
    assert ask("ckpt", "convert", tmp_path / "run", hf, "--to", "safetensors").code == 0
    with safe_open(hf / "model-00001-of-00001.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    one = ("--to", "safetensors", "--only", "b.c")
    assert ask("ckpt", "convert", tmp_path / "run", tmp_path / "one", *one).code == 0
    with safe_open(tmp_path / "one" / "model-00001-of-00001.safetensors", "pt") as opened:
        assert list(opened.keys()) == ["c"]
    written(tmp_path / "half", 7, [{"\ud800": shared}])
    answer = ask("ckpt", "convert", tmp_path / "half", tmp_path / "no", "--to", "safetensors")
    assert (answer.code, "is no UTF-8" in answer.err) == (1, True)


@pytest.mark.parametrize(
    ("source", "dest", "flags", "said"),
    [
        ("run", "s3://bucket/x", ("dcp",), "s3://bucket/x is a URL, and this has to be a folder"),
        ("run", "memory://x", ("safetensors",), "memory://x is a URL, and this has to be a folder"),
        ("s3://b/x", "new", ("elastic", "--step", "3"), "s3://b/x is a URL, and this has to be a"),
        ("dcp", "dcp", ("elastic", "--step", "3"), "/dcp is a folder of DCP: name another"),
        ("dcp", "new", ("elastic", "--step", "0"), "--step: steps are counted from 1, up to 99"),
        ("dcp", "new", ("elastic", "--step", "9" * 20), "--step: steps are counted from 1, up to"),
    ],
)
def test_places_that_cannot_be(
    path: Path, tmp_path: Path, ask: Ask, source: str, dest: str, flags: tuple[str, ...], said: str
) -> None:
    save({"n": 1}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    places = {"run": path, "dcp": tmp_path / "dcp", "new": tmp_path / "new"}
    answer = ask(
        "ckpt", "convert", places.get(source, source), places.get(dest, dest), "--to", *flags
    )
    assert answer.code in (1, 2)
    assert said in answer.err
    assert not (tmp_path / "new").exists()
    assert not Path(dest).exists()


def test_a_full_disk_is_said_and_nothing_stays(path: Path, tmp_path: Path) -> None:
    said = r"File too large: .*/hf/model-00001-of-00001"
    with files_of_at_most(100), pytest.raises(OSError, match=said):
        convert.to_safetensors(str(path), 7, str(tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()


# --- on an object store --------------------------------------------------------------------------


@pytest.fixture
def bucket(s3: str) -> str:
    name = f"b{uuid.uuid4().hex}"
    fsspec.filesystem("s3", **json.loads(s3)).mkdir(name)
    return name


def test_a_step_on_an_object_store(
    path: Path, tmp_path: Path, bucket: str, s3: str, ask: Ask
) -> None:
    url = f"s3://{bucket}/run"
    store = fsspec.filesystem("s3", **json.loads(s3))
    store.put(str(path), url, recursive=True)
    options = ("--storage-options", s3)
    listed = ask("ckpt", "ls", url, *options)
    assert (listed.code, columns(listed.lines[1])[0], listed.err) == (0, "7", ""), listed
    assert "model.0.weight" in ask("ckpt", "show", url, *options).out
    assert "all as it was written" in ask("ckpt", "verify", url, *options).out
    there, back = tmp_path / "dcp", f"s3://{bucket}/back"
    for ours, theirs in ((url, there), (there, back)):
        to = ("dcp",) if ours is url else ("elastic", "--step", "3")
        made = ask("ckpt", "convert", ours, theirs, *options, "--to", *to)
        assert (made.code, made.err) == (0, ""), made
    assert ask("ckpt", "convert", back, tmp_path / "hf", *options, "--to", "safetensors").code == 0
    found, _ = opened(tmp_path / "hf")
    assert torch.equal(found["model.0.weight"], states()[0]["model"][0].weight)
    name = f"{url}/{manifest.folder(7)}/{shard(path, 1).name}"
    store.pipe_file(name, bytes(shard(path, 1).stat().st_size))
    secret = tmp_path / "secret.json"
    secret.write_text(s3)
    damaged = ask("ckpt", "verify", url, "--storage-options", f"@{secret}")
    assert (damaged.code, shard(path, 1).name in damaged.out) == (1, True), damaged


def test_a_storage_that_cannot_be_used_is_one_line(tmp_path: Path, s3: str, ask: Ask) -> None:
    options = json.loads(s3)
    nobody = options | {
        "endpoint_url": "http://127.0.0.1:1",
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1},
    }
    for path, wrong, said in (
        ("s3://no-such/run", options, "holds no checkpoint"),
        ("s3://no-such/run", nobody, "127.0.0.1:1"),
        ("s3://no-such/run", options | {"bad": 1}, "bad"),
        ("nothing://x/run", {}, "nothing"),
        (tmp_path, {"key": "k"}, "takes none"),
    ):
        for verb, *rest in (("ls",), ("convert", tmp_path / "dest", "--to", "dcp")):
            answer = ask("ckpt", verb, path, *rest, "--storage-options", json.dumps(wrong))
            assert (answer.code, len(answer.err.splitlines())) == (1, 1), answer
            assert str(path) in answer.err, answer
            assert said in answer.err, answer
            assert options["secret"] not in answer.err, answer


@pytest.mark.parametrize("given", ["{", "[]", "tell-nobody"])
def test_options_that_are_none_are_not_repeated(given: str, tmp_path: Path, ask: Ask) -> None:
    answer = ask("ckpt", "ls", tmp_path, "--storage-options", given)
    assert answer.code == 2
    assert "it is no JSON object" in answer.err
    assert "tell-nobody" not in answer.err


def test_options_in_a_file_that_is_not_there(tmp_path: Path, ask: Ask) -> None:
    answer = ask("ckpt", "ls", tmp_path, "--storage-options", f"@{tmp_path / 'none'}")
    assert (answer.code, "No such file" in answer.err) == (2, True), answer


# --- to DCP and back -----------------------------------------------------------------------------


def target() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    return {
        "model": model.state_dict(),
        "n": -1,
        "lr": -1,
        "own": torch.zeros(2, dtype=torch.int64),
    }


def check(found: dict[str, Any]) -> None:
    expected = states()[0]
    model = expected["model"].state_dict()
    assert all(torch.equal(found["model"][name], model[name]) for name in model)
    assert (found["n"], found["lr"], found["own"].tolist()) == (0, 0.5, [0, 0])


def test_to_dcp_and_back(path: Path, tmp_path: Path, ask: Ask) -> None:
    assert ask("ckpt", "convert", path, tmp_path / "dcp", "--to", "dcp").code == 0
    found = target()
    load(found, storage_reader=FileSystemReader(tmp_path / "dcp"))
    check(found)
    back = ask(
        "ckpt", "convert", tmp_path / "dcp", tmp_path / "new", "--to", "elastic", "--step", "3"
    )
    assert (back.code, back.err) == (0, "")
    assert ask("ckpt", "verify", tmp_path / "new", "--step", "3").code == 0
    found = target()
    load(found, storage_reader=StorageReader(tmp_path / "new"))
    check(found)
    again = ask(
        "ckpt", "convert", tmp_path / "dcp", tmp_path / "new", "--to", "elastic", "--step", "3"
    )
    assert again.code == 1
    assert "has a step 3 already" in again.err


def test_a_folder_of_dcp_is_known_for_one(tmp_path: Path, ask: Ask) -> None:
    save({"n": 1}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    answer = ask("ckpt", "ls", tmp_path / "dcp")
    assert answer.code == 1
    assert "is a checkpoint of DCP: make it one of ours" in answer.err


# --- what DCP wrote ------------------------------------------------------------------------------


class Hostile:
    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._canary),)


def test_hostile_metadata_runs_nothing(tmp_path: Path, ask: Ask) -> None:
    canary = tmp_path / "canary"
    save({"w": torch.ones(1)}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps({"w": Hostile(canary)}))
    answer = ask(
        "ckpt", "convert", tmp_path / "dcp", tmp_path / "new", "--to", "elastic", "--step", "1"
    )
    assert answer.code == 1
    assert "posix.mkdir, which DCP has no use for" in answer.err
    assert not canary.exists()
    assert not (tmp_path / "new").exists()


def test_a_pipe_in_the_place_of_a_file_of_dcp_is_not_waited_for(tmp_path: Path, ask: Ask) -> None:
    save({"w": torch.ones(1)}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    (pipe,) = (tmp_path / "dcp").glob("*.distcp")
    pipe.unlink()
    os.mkfifo(pipe)
    with open(pipe, "r+b", buffering=0):  # so that who opens it does not wait here
        answer = ask(
            "ckpt", "convert", tmp_path / "dcp", tmp_path / "new", "--to", "elastic", "--step", "1"
        )
    assert (answer.code, answer.err) == (1, f"elasticctl: {pipe}: w is in a pipe, not in a file\n")


def test_a_hostile_value_runs_nothing(tmp_path: Path, ask: Ask) -> None:
    canary = tmp_path / "canary"
    save(
        {"w": torch.ones(1), "n": Hostile(canary)},
        storage_writer=FileSystemWriter(tmp_path / "dcp"),
    )
    answer = ask(
        "ckpt", "convert", tmp_path / "dcp", tmp_path / "new", "--to", "elastic", "--step", "1"
    )
    assert answer.code == 1
    assert "n is damaged, or more than tensors, numbers and texts" in answer.err
    assert not canary.exists()


def test_metadata_names_no_file_elsewhere(tmp_path: Path) -> None:
    save({"w": torch.ones(1)}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    file = tmp_path / "dcp" / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"__0_0.distcp", b"../../passwd"))
    with pytest.raises(CheckpointError, match="no name of a file"):
        foreign.read(tmp_path / "dcp")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: setattr(told, "length", 1 << 40), "its file ends before it does"),
        (lambda told: setattr(told, "relative_path", "a\0b"), "no name of a file"),
    ],
    ids=["length", "name"],
)
def test_metadata_of_what_is_not_there(
    tmp_path: Path, ask: Ask, change: Callable[[Any], None], said: str
) -> None:
    save({"w": torch.ones(4)}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for told in metadata.storage_data.values():
        change(told)
    file.write_bytes(pickle.dumps(metadata))
    to = ("--to", "elastic", "--step", "1")
    answer = ask("ckpt", "convert", tmp_path / "dcp", tmp_path / "new", *to)
    assert (answer.code, said in answer.err, "Traceback" in answer.err) == (1, True, False)


def test_a_tensor_whose_pieces_do_not_make_it_up(tmp_path: Path, ask: Ask) -> None:
    save({"w": torch.ones(4)}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 40])
    file.write_bytes(pickle.dumps(metadata))
    to = ("--to", "elastic", "--step", "1")
    answer = ask("ckpt", "convert", tmp_path / "dcp", tmp_path / "new", *to)
    assert answer.code == 1
    assert "its pieces of w do not make it up" in answer.err


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@example(at=4300, byte=1, cut=False)  # a piece of which no chunk is told
@given(at=st.integers(0, 10**4), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_metadata_is_refused_in_a_sentence(
    tmp_path: Path, at: int, byte: int, cut: bool
) -> None:
    if not (tmp_path / "dcp").exists():
        save({"w": torch.ones(2, 3), "n": 1}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
        (tmp_path / "sound").write_bytes((tmp_path / "dcp" / ".metadata").read_bytes())
    data = bytearray((tmp_path / "sound").read_bytes())
    at %= len(data)
    data[at] = byte
    (tmp_path / "dcp" / ".metadata").write_bytes(data[:at] if cut else data)
    try:
        entries, _ = foreign.read(tmp_path / "dcp")
    except CheckpointError:
        return
    assert all(isinstance(entry, foreign.Entry) for entry in entries)
