"""A job whose parts are killed at random moments, of a save, a flush, a commit, a copy, a load: what is
committed always loads, bit for bit, and nothing torn ever does."""

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.checkpoint import manifests
from elastic.checkpoint.storage import Folder
from tests.e2e.harness import Job, Node, processes

SCRIPT = Path(__file__).parent / "harness" / "scripts" / "saves.py"
VICTIMS = (
    *("rank",) * 8, *("flusher",) * 4, *("courier",) * 2, *("agent",) * 2, *("master",) * 2,
    "guardian", "all",
)  # fmt: skip


class Run:
    """Two nodes of one rank, each with a part of its own; every third step goes to storage."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self.random = random.Random(seed)
        self.seen: dict[tuple[int, int], tuple[str, str]] = {}
        """What each rank had at each step: the same, however often it is computed."""
        self.looked = 0
        self.nodes = [self.start(0), self.start(1)]

    def start(self, number: int) -> Node:
        entry = (str(SCRIPT), str(self.job.folder), "--own", "2000000", "--persist-every", "3")
        flags = ("--last-call", "0.2", "--max-restarts", "1000000")
        node = self.job.start(*flags, nodes="2", nproc=1, entry=entry, name=f"node{number}")
        if number == 0:
            node.master()
        return node

    def kill(self, victim: str) -> None:
        """One part, at a random moment; wait until training goes on."""
        node = self.random.choice(self.nodes)
        before, committed = self.job.round(), self.committed()
        find: dict[str, Callable[[], int]] = {
            "rank": lambda: self.job.rank(before, self.random.randrange(2)),
            "flusher": lambda: node.part("elastic-flusher"),
            "courier": lambda: node.part("elastic-courier"),
            "agent": node.agent,
            "master": self.nodes[0].master,
            "guardian": lambda: self.nodes[1].guardian,
        }
        pids = [find[victim]()] if victim in find else []
        threading.Event().wait(self.random.uniform(0, 0.3))
        processes.kill(*pids)
        if victim == "guardian":
            assert self.nodes[1].exit_code() == -signal.SIGKILL
            self.nodes[1] = self.start(1)
        elif victim == "all":
            while left := self.job.left():  # also what a part that dies starts
                processes.kill(*(process.pid for process in left))
            for node in self.nodes:
                node.process.wait()
            self.nodes = [self.start(0), self.start(1)]
        if victim in ("flusher", "courier", "master"):
            self.job.wait_for_more_steps(before, 2, 2)
        else:
            self.job.wait_for_steps(2, after=before, count=2)
        self.check(committed)

    def committed(self) -> int:
        found = manifests.committed(Folder(Path(self.job.folder / "checkpoint")))
        return 0 if found is None else found.step

    def check(self, committed: int) -> None:
        """What was loaded and computed since the last look."""
        lines = [x for x in self.job.told("step") + self.job.told("loaded") if x.fields["step"]]
        for line in lines:
            key = line.rank, line.fields["step"]
            had = line.fields["digest"], line.fields["own"]
            assert self.seen.setdefault(key, had) == had, f"{line}: {self.job.dump()}"
        loaded = {(x.round, x.fields["step"]) for x in self.job.told("loaded")}
        new = [step for number, step in loaded if number > self.looked]
        assert all(step >= committed for step in new), f"{new} < {committed}: {self.job.dump()}"
        assert len({number for number, _ in loaded}) == len(loaded), self.job.dump()
        self.looked = max(number for number, _ in loaded)


def kill_at_random(job: Job, count: int) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    run = Run(job, seed)
    job.wait_for_steps(2, count=4)
    victims = [VICTIMS[number % len(VICTIMS)] for number in range(count)]
    run.random.shuffle(victims)
    for victim in victims:
        run.kill(victim)
    job.finish()
    for node in run.nodes:
        assert node.exit_code() == 0, job.dump()
    job.assert_nothing_left()
    run.check(0)
    newest = run.committed()
    run.nodes = [run.start(0), run.start(1)]
    for node in run.nodes:
        assert node.exit_code() == 0, job.dump()
    run.check(newest)


@pytest.mark.timeout(1800)
def test_a_hundred_kills(job: Job) -> None:
    kill_at_random(job, 100)


@pytest.mark.soak
def test_a_thousand_kills(job: Job) -> None:
    kill_at_random(job, 1000)
