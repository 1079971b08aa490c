"""What an earlier version wrote, byte for byte, is read by this version, and by its neighbours' rules.

The files in recorded/ were written once by the version in their name, and are never written again: a change that no longer
reads them has broken a running job's neighbours, or its journal. A journal's is written, of the history beside it, by
`python -m tests.proto.test_recorded`.
"""

import json
import mmap
import re
import shutil
import sqlite3
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.master import events as ev
from elastic.master import journal
from elastic.master.job import Job, replay
from elastic.master.journal import Entry, Journal
from elastic.master.policy import Policy
from elastic.proto import codec, elasticjob, link, page, slot, version
from elastic.proto import master_pb2 as pb
from elastic.proto.elasticjob import (
    Accepted,
    AvoidedNode,
    JobState,
    PodFailure,
    Training,
    Workers,
)
from elastic.proto.errors import JournalError, LinkError, ProtocolMismatch
from elastic.proto.page import Beat, DeviceStep
from tests.proto.chunks import damaged

RECORDED = Path(__file__).parent / "recorded"
WALL = 1_700_000_000.0
"""When the recorded job began, in seconds of Unix."""
MINOR = 10
"""Where a page's minor version stands, little-endian."""


def test_page() -> None:
    seen = page.read((RECORDED / "page-1.0.bin").read_bytes())
    assert (seen.step, seen.ticks, seen.phase, seen.claims) == (41, 2, "evaluate", 1)


def test_what_steps_took_is_on_a_page_from_1_1_on() -> None:
    """A rank of 1.0 tells nothing of its device."""

    def opened(name: str) -> mmap.mmap:
        with open(RECORDED / name, "rb") as file:
            return mmap.mmap(file.fileno(), page.SIZE, access=mmap.ACCESS_READ)

    assert page.device_steps(opened("page-1.0.bin"), 0) == ([], 0)
    seen = opened("page-1.1.bin")
    assert page.read(seen).step == 41
    assert (page.beats(seen, 39), page.stage(seen)) == ([Beat(40, 40_000_000, 40_000)], 7)
    steps, count = page.device_steps(seen, 0)
    assert (count, [one.number for one in steps]) == (35, [*range(10, 41)])
    assert steps[-1] == DeviceStep(40, 200, 400, 100, 65, True)


@pytest.mark.parametrize(("minor", "fits"), [(1, True), (2, True), (3, False)])
def test_page_of_a_neighbour(minor: int, fits: bool) -> None:
    raw = bytearray((RECORDED / "page-1.0.bin").read_bytes())
    raw[MINOR : MINOR + 2] = minor.to_bytes(2, "little")
    if fits:
        assert page.read(bytes(raw)).step == 41
    else:
        with pytest.raises(ProtocolMismatch, match=r"1\.3"):
            page.read(bytes(raw))


def slot_of(minor: int = 0, major: int = 1) -> memoryview:
    """With a digest that fits, and something in what was reserved."""
    raw = bytearray((RECORDED / "slot-1.0.bin").read_bytes())
    if minor:
        struct.pack_into("=HH", raw, 8, major, minor)
        raw[120], raw[3000] = 1, 1
        head = slot.parse(memoryview(raw))
        table = memoryview(raw)[slot.PAGE :][head.table_at : head.image_bytes]
        struct.pack_into("=Q", raw, 72, slot._digest(memoryview(raw), table))
    return memoryview(raw)


@pytest.mark.parametrize("minor", [0, 1, 2])
def test_slot(minor: int) -> None:
    found = slot.read(slot_of(minor))
    assert found.stamp == slot.Stamp(
        job="recorded", step=7, round=3, rank=1, world_size=2, generation=9, local_rank=1,
        local_world_size=2, persist=True, value=0.31,
    )  # fmt: skip
    assert (found.units, found.all_units, found.beliefs) == ((5, 2**64 - 1), 7, ())
    assert damaged(found.image, found.chunks) == []
    assert b'"w":{' in found.image[: found.chunks[0].end].tobytes()


@pytest.mark.parametrize(("major", "minor"), [(1, 3), (2, 1)])
def test_slot_of_a_stranger(major: int, minor: int) -> None:
    said = f"the slot speaks version {major}.{minor}, this side 1.1"
    with pytest.raises(ProtocolMismatch, match=said):
        slot_of(minor, major)


LINK = [
    link.TorchNote(environ={"A": "b"}, argv=("x.py",), path=("/p",)),
    link.ModulesNote(modules=("numpy",), environ={"A": "c"}),
    link.FirstStep(step=7),
    link.ErrorNote(type="ValueError", message="no", frame="x.py:3 in f", traceback="t"),
    link.UnitAsked(ranks=4),
    link.UnitAnswered(reason=""),
]


def test_link() -> None:
    lines = (RECORDED / "link-1.0.jsonl").read_bytes().splitlines()
    assert [link.parse(line) for line in lines] == LINK


def test_link_of_neighbours() -> None:
    """A field that only the newer one knows is passed over; two minors away is refused."""
    for line, message in zip(
        (RECORDED / "link-1.0.jsonl").read_bytes().splitlines(), LINK, strict=True
    ):
        newer = {**json.loads(line), "v": "1.1", "of the future": [1]}
        assert link.parse(json.dumps(newer).encode()) == message
        with pytest.raises(LinkError, match=r"1\.2"):
            link.parse(json.dumps({**newer, "v": "1.2"}).encode())


def test_wire() -> None:
    hello = pb.FromAgent.FromString((RECORDED / "hello-1.0.bin").read_bytes()).hello
    assert (hello.run_id, hello.node_id, hello.incarnation, hello.slots) == ("gpt", "a", 99, 8)
    assert (hello.node_rank, dict(hello.labels), hello.spare_store) == (
        3,
        {"rack": "7"},
        "10.0.0.1:2",
    )
    (failure,) = hello.report.failures
    assert (hello.report.round, failure.rank, failure.exit_code) == (4, 5, -9)
    order = pb.ToAgent.FromString((RECORDED / "directive-1.0.bin").read_bytes()).directive
    assert (order.kind, order.round, order.first_rank, order.world_size) == (
        pb.Directive.RUN,
        5,
        8,
        16,
    )
    assert (order.store, order.stop_grace, order.restart_count) == ("10.0.0.1:2", 0.5, 1)


def test_wire_of_a_newer_neighbour() -> None:
    """A field that this version does not know is passed over."""
    unknown = bytes([0xFA, 0x3F, 0x02, 0x68, 0x69])  # field 1023, two bytes
    body = pb.ToAgent.FromString((RECORDED / "directive-1.0.bin").read_bytes())
    order = pb.Directive.FromString(body.directive.SerializeToString() + unknown)
    assert (order.round, order.store) == (5, "10.0.0.1:2")


def elasticjob_of(**more: object) -> dict[str, Any]:
    """`status.accepted` and `status.job` of format 1, before it had the master's name; more: in both."""
    found = json.loads((RECORDED / "elasticjob-1.json").read_text())
    return {name: {**part, **more} for name, part in found.items()}


@pytest.mark.parametrize("news", [{}, {"news": {"a": [1]}}], ids=["older", "newer"])
def test_what_neighbours_say_of_an_elasticjob(news: dict[str, object]) -> None:
    """What the older does not say is as if nobody did; what only the newer knows is left out."""
    status = elasticjob_of(**news)
    accepted, state = elasticjob.accepted(status), elasticjob.job_state(status)
    assert accepted is not None
    assert (accepted.generation, accepted.wanted, accepted.attempt) == (3, "Run", 2)
    assert accepted.names("job-master-r2"), "any master's"
    assert accepted.spec["image"] == "train:1"
    assert state == JobState(
        generation=3, attempt=2, state="Running", world_size=8, round=4, restarts=3, restarts_counted=1,
        productive_seconds=12.5, training=Training(step=41, stepped_at=WALL),
        workers=Workers(
            desired=2, ready=1, spares=1, pending=("job-worker-1-r0: no node has room",),
            refused="exceeded quota",
        ),
        last_failures=(
            PodFailure(
                time=WALL - 10, pod="job-worker-1-r0", node="node-3", rank=5, exit_code=137,
                cause="OOMKilled", action="ReplacePod", reason="job-worker-1-r0: no memory",
            ),
        ),
        avoided_nodes=(AvoidedNode(node="node-3", reason="an Xid", until=WALL + 3600),),
    )  # fmt: skip


def test_an_elasticjobs_status_of_a_stranger() -> None:
    status = elasticjob_of(format=2)
    for name, read in (("accepted", elasticjob.accepted), ("job", elasticjob.job_state)):
        with pytest.raises(ProtocolMismatch, match=rf"status\.{name} has format 2, this release"):
            read(status)


@pytest.mark.parametrize(
    ("named", "pod", "meant"),
    [("", "", True), ("", "a", True), ("a", "", True), ("a", "a", True), ("a", "b", False)],
)
def test_a_master_obeys_what_names_it(named: str, pod: str, meant: bool) -> None:
    """An operator that names nobody, and a pod that was told no name, are of the release before."""
    assert Accepted(generation=1, spec={}, master=named).names(pod) is meant


def test_journal() -> None:
    lines = (RECORDED / "events-2.0.jsonl").read_text().splitlines()
    for named in ("2.1", "2.2"):
        lines += (RECORDED / f"events-{named}.jsonl").read_text().splitlines()
    events = [codec.loads(ev.Event, line) for line in lines]
    assert {type(event) for event in events} == set(ev.Event.__args__)
    attached = events[1]
    assert isinstance(attached, ev.Attached)
    assert (attached.nodes[0].labels, attached.nodes[0].node_rank) == ((("rack", "7"),), 3)
    assert [codec.dumps(event) for event in events] == lines


def history(named: str) -> list[tuple[ev.Event, float]]:
    lines = (RECORDED / f"history-{named}.jsonl").read_text().splitlines()
    return [(codec.loads(ev.Event, json.dumps(event)), at) for at, event in map(json.loads, lines)]


def test_a_journal_is_folded_to_the_state_that_it_meant() -> None:
    """Else a master that takes it over would go back on what was decided."""
    job = replay(Job(), history("2.0"), Policy())
    assert job.last_round == 3
    recorded = (RECORDED / "state-2.0.json").read_text().strip()
    assert codec.dumps(as_then(job)) == recorded
    assert codec.loads(Job, recorded) == as_then(job)


def as_then(job: Job) -> Job:
    """Without what is noted since: how far the round before came and how long it stood, and that this one went beyond it."""
    assert job.round is not None
    assert (job.round.advanced, job.recovery.reached) == (True, 12)
    assert job.recovery.lasted > 0
    before = replace(job.recovery, reached=0, lasted=0.0)
    return replace(job, round=replace(job.round, advanced=False), recovery=before)


@pytest.mark.parametrize(
    ("named", "fits"), [("2.0", False), ("2.1", True), ("2.2", True), ("2.3", True), ("2.4", False)]
)
def test_a_journals_database(tmp_path: Path, named: str, fits: bool) -> None:
    """A snapshot, the events after it, and notes; a neighbour's has another version's name."""
    path = tmp_path / "journal.db"
    shutil.copyfile(RECORDED / "journal-2.0.db", path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("update meta set value = ?", (named,))
    if not fits:
        with pytest.raises(JournalError, match=rf"speaks version {re.escape(named)}"):
            Journal(path)
        return
    with closing(Journal(path)) as opened:
        job, wall, at, entries = opened.load()
        (note,) = opened.notes(0)
    assert (job.last_round, wall, at) == (2, WALL + 7.0, 7.0)
    assert [entry.wall - WALL for entry in entries] == [entry.job for entry in entries]
    job = replay(job, ((entry.event, entry.job) for entry in entries), Policy())
    assert codec.dumps(as_then(job)) == (RECORDED / "state-2.0.json").read_text().strip()
    assert (note.wall, note.job, note.kind, note.reason) == (WALL, 0.0, "MasterStarted", "begins")


def record(path: Path, events: list[tuple[ev.Event, float]]) -> None:
    """Write today's journal of what happened: a snapshot of the first six events, and the others."""
    journal.SNAPSHOT_EVERY = 6
    job = Job()
    with closing(Journal(path)) as opened:
        opened.note(wall=WALL, job=0.0, kind=type(events[0][0]).__name__, reason="begins")
        for number, (event, at) in enumerate(events, 1):
            job = replay(job, [(event, at)], Policy())
            opened.append(Entry(wall=WALL + at, job=at, event=event), fence=True)
            if number == 6:
                opened.compact(job, WALL + at, at)


if __name__ == "__main__":
    recorded = RECORDED / f"journal-{version.JOURNAL}.db"
    recorded.touch(exist_ok=False)
    record(recorded, history(str(version.JOURNAL)))
