"""Checkpoints on storages of all kinds, by a job as people start it."""

import json
import signal
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
import xxhash

from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from tests.conftest import serve_s3
from tests.e2e.harness import FORK, Job

SCRIPTS = Path(__file__).parent / "harness" / "scripts"
SCRIPT = SCRIPTS / "stores.py"
STORED, LAST = 2, 5
"""As in removed.py."""


def run(job: Job, url: str, options: str, steps: int, *more: str) -> None:
    job.start(FORK, nproc=1, entry=(str(SCRIPT), str(job.folder), url, options, str(steps), *more))
    assert job.nodes[-1].exit_code() == 0, job.dump()


def test_a_job_saves_to_an_object_store_and_goes_on_from_it(job: Job, s3: str) -> None:
    bucket = f"b{uuid.uuid4().hex}"
    store = fsspec.filesystem("s3", **json.loads(s3))
    store.mkdir(bucket)
    run(job, f"s3://{bucket}/run", s3, 4, "--pin", "1")
    run(job, f"s3://{bucket}/run", s3, 2)
    first, second = job.told("loaded")
    assert (first.fields["step"], first.fields["latest"]) == (0, None)
    assert (second.fields["step"], second.fields["latest"]) == (4, 4)
    assert second.fields["w"] == [4.0]
    store.invalidate_cache()
    left = {path.split("/")[2] for path in store.find(f"{bucket}/run")}
    assert left == {"step-00000001", "step-00000002", "step-00000006"}, (
        "pinned, the best, the newest"
    )
    secret = json.loads(s3)["secret"]
    assert secret not in job.nodes[0].said() + job.nodes[0].printed()
    journals = [path.read_bytes() for path in job.folder.rglob("journal.db*")]
    assert journals
    assert not any(secret.encode() in journal for journal in journals), "the master is not told"


def test_a_storage_that_fails_is_told_to_who_waits_and_written_to_once_it_works(job: Job) -> None:
    path = job.folder / "checkpoint"
    run(job, str(path), "{}", 3, "--block", "2")
    (stalled,) = job.told("stalled")
    assert stalled.fields["why"] == f"{path}: step 2 is not on storage yet: File exists"
    assert job.told("end")[0].fields["latest"] == 3
    assert job.nodes[0].said().count("is not on storage yet") == 1, job.dump()


def loads_from_memory(job: Job, *storage: str) -> None:
    """Ranks and storage go as the save of a step returns; all go on from that step, with its bits."""
    job.start(
        "--shutdown-timeout", "1", entry=(str(SCRIPTS / "removed.py"), str(job.folder), *storage)
    )
    job.wait_for_steps(2, after=1, count=2)
    for rank in (0, 1):
        loaded = job.told("step", round=2, rank=rank)[0].fields
        generator = torch.Generator().manual_seed(2 * LAST + rank)
        own = torch.zeros(100_000).normal_(generator=generator)
        digest = xxhash.xxh3_64_hexdigest(own.numpy().tobytes())
        assert loaded == {"step": LAST, "digest": digest}, job.dump()


@pytest.mark.soak
def test_a_folder_that_is_removed_as_a_save_returns(job: Job) -> None:
    path = job.folder / "checkpoint"
    loads_from_memory(job, str(path), "{}")
    path.unlink()
    job.finish()
    job.ends(0)
    found = manifests.committed(Folder(path))
    assert found is not None
    assert found.step > LAST, "storage that works again is written to"


def test_an_object_store_that_is_killed_as_a_save_returns(job: Job) -> None:
    """It was to be written there. Only memory has it, and at the end that is said."""
    with serve_s3() as (options, server):
        fsspec.filesystem("s3", **json.loads(options)).mkdir("bucket")
        hasty = json.loads(options) | {"config_kwargs": {"retries": {"max_attempts": 0}}}
        loads_from_memory(job, "s3://bucket/run", json.dumps(hasty), str(server))
        said = "is not on storage yet, and tried again until it is: "
        job.wait_for("a line about storage", lambda: said in job.nodes[0].said() or None)
        job.wait_for_more_steps(2, 2)
        job.nodes[0].signal(signal.SIGTERM)
        job.ends(1)
    said = job.nodes[0].said()
    assert "was in memory alone and is lost" in said, job.dump()
    assert f"step {STORED} is on storage" in said, job.dump()
