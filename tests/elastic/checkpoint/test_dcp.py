"""DCP on our files: any world into any other, whoever wrote them, and nothing in them is ever run."""

import base64
import collections
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from elastic.checkpoint.dcp import StorageReader, StorageWriter
from elastic.checkpoint.load import files
from elastic.checkpoint.load.restore import Restore
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.state.image import SIZES, VALUES
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import manifest
from elastic.proto.errors import CheckpointError
from tests.elastic.checkpoint import dcp_ranks
from tests.elastic.checkpoint.steps import flip, forged, run_ranks, written

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two ranks: they have loaded `one`, and written `ours` and `theirs`."""
    folder = tmp_path_factory.mktemp("two")
    save(dcp_ranks.state(3, sharded=False), storage_writer=StorageWriter(folder / "one", 10))
    run_ranks(folder, 2)
    return folder


# --- worlds --------------------------------------------------------------------------------------


def test_two_ranks_into_one(two: Path) -> None:
    expected = dcp_ranks.state(3, sharded=False)
    expected |= {
        "rows": torch.arange(15.0).view(3, 5),
        "columns": torch.arange(15.0).view(3, 5) * 2,
        "copies": torch.arange(15.0).view(3, 5) * 3,
        "short": torch.ones(1, dtype=torch.bfloat16),
        "scalar": torch.tensor(7.5),
    }
    found = dcp_ranks.state(1, sharded=False) | {
        key: torch.zeros_like(value)
        for key, value in expected.items()
        if isinstance(value, torch.Tensor)
    }
    load(found, storage_reader=StorageReader(two / "ours"))
    assert dcp_ranks.same(found, expected)


def test_each_rank_wrote_its_own_and_the_first_all_values(two: Path) -> None:
    found, wrong = files.sources(Folder(Path(two / "ours")), 10)
    assert wrong == []
    assert found.keys() == {0, 1}
    assert all(source.image.pieces["rows"].extent != (3, 5) for source in found.values())
    first, second = (found[rank].values(str) for rank in (0, 1))
    assert first["step"] == 3
    assert first["seen"] == {"epochs": (3, 4), "names": ["a", {"b": 3}]}
    assert second == {}


def test_one_rank_into_two(two: Path) -> None:
    assert [(two / f"loaded-{rank}").read_text() for rank in range(2)] == ["same", "same"]


# --- one rank ------------------------------------------------------------------------------------


def every_dtype() -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(6 * size, dtype=torch.uint8).view(getattr(torch, name))
        for name, size in SIZES.items()
        if name != "bool"
    } | {"bool": torch.tensor([True, False, True])}


def test_every_dtype(tmp_path: Path) -> None:
    state = every_dtype()
    save(dict(state), storage_writer=StorageWriter(tmp_path, 1))
    found = {
        name: torch.zeros(t.nbytes, dtype=torch.uint8).view(t.dtype) for name, t in state.items()
    }
    load(found, storage_reader=StorageReader(tmp_path))
    assert {name: bits(t) for name, t in found.items()} == {
        name: bits(t) for name, t in state.items()
    }


def test_values_of_every_kind(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "counter": collections.Counter({"a": 2}),
        "pair": (1, torch.arange(3), (torch.ones(2),)),
        "list": [torch.ones(2), 5, {"x": 1}],
        "big": 7 << 80,
        "nan": float("inf"),
        "bytes": b"\x80\x04.",
        "none": None,
        "empty": torch.empty(0, 3),
        "strided": torch.arange(12.0).view(3, 4).t(),
    }
    save(state, storage_writer=StorageWriter(tmp_path, 1))
    found: dict[str, Any] = {
        "counter": collections.Counter({"a": 0}),
        "pair": None,
        "list": [torch.zeros(2), 0, {"x": 0}],
        **dict.fromkeys(("big", "nan", "bytes", "none"), 0),
        "empty": torch.empty(0, 3),
        "strided": torch.zeros(4, 3),
    }
    load(found, storage_reader=StorageReader(tmp_path))
    assert found["pair"][0] == 1
    assert found["pair"][1].tolist() == [0, 1, 2]
    assert found["pair"][2][0].tolist() == [1, 1]
    assert found["list"][0].tolist() == [1, 1]
    assert found["list"][1:] == [5, {"x": 1}]
    assert torch.equal(found["strided"], state["strided"])
    for name in ("counter", "big", "nan", "bytes", "none"):
        assert found[name] == state[name]


def test_another_dtype_is_converted_as_dcp_does(tmp_path: Path) -> None:
    save({"w": torch.tensor([1.5, -2.0])}, storage_writer=StorageWriter(tmp_path, 1))
    found = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    load(found, storage_reader=StorageReader(tmp_path))
    assert found["w"].tolist() == [1.5, -2.0]


def test_the_newest_a_step_and_a_checkpoint_id(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path, 30)
    save({"w": torch.tensor(30)}, storage_writer=writer)
    for step in (10, 20):
        save(
            {"w": torch.tensor(step)},
            storage_writer=writer,
            checkpoint_id=tmp_path / manifest.folder(step),
        )
    found = {"w": torch.tensor(0)}
    load(found, storage_reader=StorageReader(tmp_path))
    assert found["w"] == 20  # the last that was committed
    load(found, storage_reader=StorageReader(tmp_path, 30))
    assert found["w"] == 30
    load(
        found, storage_reader=StorageReader(tmp_path), checkpoint_id=tmp_path / manifest.folder(10)
    )
    assert found["w"] == 10


def test_a_step_that_is_written_again_is_the_later_one(tmp_path: Path) -> None:
    for number in (1, 2):
        save({"w": torch.tensor(number)}, storage_writer=StorageWriter(tmp_path, 5))
    found = {"w": torch.tensor(0)}
    load(found, storage_reader=StorageReader(tmp_path))
    assert found["w"] == 2


def test_a_save_in_the_background(tmp_path: Path) -> None:
    async_save({"w": torch.tensor(4), "n": 5}, storage_writer=StorageWriter(tmp_path, 1)).result()  # type: ignore[union-attr]
    found = {"w": torch.tensor(0), "n": 0}
    load(found, storage_reader=StorageReader(tmp_path))
    assert (found["w"], found["n"]) == (4, 5)


def test_a_url() -> None:
    save({"w": torch.tensor(4)}, storage_writer=StorageWriter("memory://dcp/run", 1))
    found = {"w": torch.tensor(0)}
    load(found, storage_reader=StorageReader("memory://dcp/run"))
    assert found["w"] == 4


# --- beside Checkpointer -------------------------------------------------------------------------


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def test_what_checkpointer_wrote(tmp_path: Path) -> None:
    """Each rank's own values first; names of ours that differ from DCP's; memory that is shared."""
    torch.manual_seed(1)
    model = tied()
    states = [
        {"model": model, "list": [torch.full((2,), rank), {"x": rank}], "map": {3: rank}, "n": rank}
        for rank in range(2)
    ]
    written(tmp_path, 7, states)
    torch.manual_seed(2)
    found = {"model": tied(), "list": [torch.zeros(2, dtype=torch.int64), {"x": 9}], "n": 9}
    load(found, storage_reader=StorageReader(tmp_path))
    assert dcp_ranks.same(dict(found["model"].state_dict()), dict(model.state_dict()))  # type: ignore[attr-defined]
    assert found["n"] == 0
    assert found["list"][1] == {"x": 0}  # type: ignore[index]
    assert found["list"][0].tolist() == [0, 0]  # type: ignore[index]


def test_checkpointer_reads_what_dcp_wrote(two: Path) -> None:
    """Its parts: all files into a state of modules and values."""
    sources, _ = files.sources(Folder(Path(two / "ours")), 10)
    model, _ = dcp_ranks.trained(1, sharded=False)
    state = {"model": model, "step": 0, "seen": {"epochs": None, "names": None}}
    for order in ((0, 1), (1, 0)):
        Restore([sources[rank] for rank in order], Place()).apply(state, strict=True)
        expected = dcp_ranks.state(3, sharded=False)
        assert dcp_ranks.same(dict(model.state_dict()), expected["model"])
        assert (state["step"], state["seen"]) == (expected["step"], expected["seen"])


# --- damage --------------------------------------------------------------------------------------


def test_a_damaged_copy_is_replaced_by_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = written(tmp_path, 7, [{"w": torch.arange(4)}, {"w": torch.arange(4)}])
    flip(folder / manifest.file(0, 2, 3, "job"), "w")
    found = {"w": torch.zeros(4, dtype=torch.int64)}
    load(found, storage_reader=StorageReader(tmp_path))
    assert found["w"].tolist() == [0, 1, 2, 3]
    assert f"{folder / manifest.file(0, 2, 3, 'job')}: w is damaged" in caplog.text


def test_a_damaged_piece_without_a_copy_is_named(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "ours", tmp_path / "ours")
    (file,) = (tmp_path / "ours" / manifest.folder(10)).glob("shard-00001*")
    flip(file, "rows")
    with pytest.raises(CheckpointException, match=f"{file}: rows is damaged"):
        load({"rows": torch.zeros(3, 5)}, storage_reader=StorageReader(tmp_path / "ours"))
    load({"columns": torch.zeros(3, 5)}, storage_reader=StorageReader(tmp_path / "ours"))


def test_a_missing_file_leaves_no_hole(
    two: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(two / "ours", tmp_path / "ours")
    (file,) = (tmp_path / "ours" / manifest.folder(10)).glob("shard-00001*")
    file.unlink()
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: rows"):
        load({"rows": torch.zeros(3, 5)}, storage_reader=StorageReader(tmp_path / "ours"))
    assert f"{file}: No such file" in caplog.text
    assert "rows is not whole in what is there" in caplog.text


# --- what is refused -----------------------------------------------------------------------------


def test_no_step_and_no_folder_of_a_step(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no step that is committed"):
        StorageReader(tmp_path)
    with pytest.raises(CheckpointError, match="has no step 3"):
        StorageReader(tmp_path, 3)
    with pytest.raises(CheckpointError, match="a checkpoint_id is the folder of a step"):
        StorageWriter(tmp_path, 1).reset(tmp_path / "latest")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), "x is a builtins.object, which a checkpoint cannot keep"),
        (io.BytesIO(b"x"), "x is a _io.BytesIO"),
        (torch.zeros(2).to_sparse(), "x is a tensor of layout torch.sparse_coo"),
        ((torch.zeros(2).to_sparse(),), r"x\[0\] is a tensor of layout"),
    ],
)
def test_what_cannot_be_kept_is_named(tmp_path: Path, value: object, what: str) -> None:
    with pytest.raises(CheckpointException, match=what):
        save({"x": value}, storage_writer=StorageWriter(tmp_path, 1))
    assert manifests.committed(Folder(tmp_path)) is None


class Other(SavePlanner):
    """The default one, within another."""

    def __init__(self) -> None:
        self._inner = DefaultSavePlanner()

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self._inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return self._inner.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return self._inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self._inner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._inner.resolve_data(write_item)


def test_a_planner_of_another_kind_has_only_a_pickle(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"n is no tensor, and Other has only a pickle"):
        save({"n": 1}, storage_writer=StorageWriter(tmp_path, 1), planner=Other())
    save({"w": torch.ones(1)}, storage_writer=StorageWriter(tmp_path, 1), planner=Other())


class Halved(DefaultSavePlanner):
    """Plans one dtype and hands over another."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object.half()


def test_a_planner_keeps_to_its_plan(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="w is not of the dtype and shape"):
        save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path, 1), planner=Halved())


def test_plans_that_are_kept_would_lose_what_has_moved(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save({"n": 1}, storage_writer=StorageWriter(tmp_path, 1), planner=planner)
    with pytest.raises(CheckpointException, match="without enable_plan_caching"):
        save({"n": 1}, storage_writer=StorageWriter(tmp_path, 2), planner=planner)


def test_every_rank_commits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="one rank commits for all"):
        StorageWriter(tmp_path, 1).set_up_storage_writer(True, use_collectives=False)


def test_ranks_that_found_different_steps_are_told(tmp_path: Path) -> None:
    plans = []
    for step in (10, 20):
        save({"n": 1}, storage_writer=StorageWriter(tmp_path, step))
        reader = StorageReader(tmp_path)
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(CheckpointError, match="found several, 10, 20: say which"):
        reader.prepare_global_plan(plans)


# --- hostile -------------------------------------------------------------------------------------


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._canary),)


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def test_the_hostile_entry_is_one(tmp_path: Path) -> None:
    """Else the tests below show nothing: torch's own reader runs it."""
    canary = tmp_path / "canary"
    save({"n": Hostile(canary)}, storage_writer=FileSystemWriter(tmp_path / "theirs"))
    load({"n": 0}, storage_reader=FileSystemReader(tmp_path / "theirs"))
    assert canary.exists()


@pytest.mark.parametrize("form", ["pickle", "torch.save", "bytes", "text", "tags"])
def test_a_hostile_entry_runs_nothing(tmp_path: Path, form: str) -> None:
    canary = tmp_path / "canary"
    hostile = saved(Hostile(canary))
    latin = hostile.decode("latin-1")
    values = {
        "pickle": pickle.dumps({"n": Hostile(canary)}),
        "torch.save": saved({"n": Hostile(canary)}),
        "bytes": b'{"n":{"$bytes":"%s"}}' % base64.b64encode(hostile),
        "text": json.dumps({"n": latin}).encode(),
        "tags": json.dumps({"n": {"$pickle": latin}}).encode(),
    }[form]
    forged(tmp_path / manifest.folder(1), values)
    state: dict[str, Any] = {"n": 0}
    if form in ("bytes", "text"):  # a value like any other
        load(state, storage_reader=StorageReader(tmp_path))
        assert state["n"] in (hostile, latin)
    else:
        with pytest.raises(CheckpointException):
            load(state, storage_reader=StorageReader(tmp_path))
        assert state == {"n": 0}
    assert not canary.exists()


def test_what_reaches_the_planners_unpickler_is_never_of_a_file(tmp_path: Path) -> None:
    """A tensor's bytes that are a pickle, asked for as a value."""
    canary = tmp_path / "canary"
    hostile = torch.frombuffer(bytearray(saved(Hostile(canary))), dtype=torch.uint8)
    save({"n": hostile}, storage_writer=StorageWriter(tmp_path, 1))
    with pytest.raises(CheckpointException):
        load({"n": 0}, storage_reader=StorageReader(tmp_path))
    assert not canary.exists()


def test_a_folder_of_dcps_own_is_not_read(tmp_path: Path) -> None:
    save({"n": Hostile(tmp_path / "canary")}, storage_writer=FileSystemWriter(tmp_path / "theirs"))
    with pytest.raises(CheckpointError, match="has no step that is committed"):
        StorageReader(tmp_path / "theirs")
    assert not (tmp_path / "canary").exists()


def test_a_load_without_the_default_planner_gets_a_pickle_of_ours(tmp_path: Path) -> None:
    """Its bytes are made from the value, whatever the file's were."""
    save({"n": (1, "a")}, storage_writer=StorageWriter(tmp_path, 1))
    got: list[bytes] = []

    class Spy(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            got.append(value.getvalue())

    load({"n": 0}, storage_reader=StorageReader(tmp_path), planner=Spy())
    assert VALUES.encode() not in got[0]
    assert torch.load(io.BytesIO(got[0]), weights_only=True) == (1, "a")
