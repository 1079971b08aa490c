"""Checkpoints on storages of all kinds, by a job as people start it."""

import json
import uuid
from pathlib import Path

import fsspec

from tests.e2e.harness import Job

SCRIPT = Path(__file__).parent / "harness" / "scripts" / "stores.py"


def run(job: Job, url: str, options: str, steps: int, *more: str) -> None:
    job.start(nproc=1, entry=(str(SCRIPT), str(job.folder), url, options, str(steps), *more))
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
