"""A job whose parts are killed at random moments, and in the midst of a save, a flush, a commit, a copy to
the other node, a deletion, a load: what is committed always loads, bit for bit, and nothing torn ever does."""

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from tests.e2e.harness import Job, Node, processes
from tests.e2e.harness.moments import KINDS, Moments

SCRIPT = Path(__file__).parent / "harness" / "scripts" / "saves.py"
VICTIMS = (
    *("rank",) * 8, *("flusher",) * 4, *("courier",) * 2, *("agent",) * 2, *("master",) * 2,
    "guardian", "all",
)  # fmt: skip
STRIKES = (*("",) * 9, *("save",) * 2, *("restore",) * 4, *("deletion",) * 3, "commit", "flush")
"""When: in the midst of that; at any moment, which is mostly one of a flush or a copy."""


KEEP = 2
"""Steps that stay on storage."""


class Run:
    """Two nodes of one rank, each with a part of its own; every third step goes to storage."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self.random = random.Random(seed)
        self.moments = Moments(job, KEEP)
        self.hits = Counter[tuple[str, str]]()
        """How often which part was killed in the midst of what."""
        self.kills = 0
        self.seen: dict[tuple[int, int], tuple[str, str]] = {}
        """What each rank had at each step: the same, however often it is computed."""
        self.looked = 0
        self.nodes = [self.start(0), self.start(1)]

    def start(self, number: int) -> Node:
        flags = ("--last-call", "0.2", "--max-restarts", "1000000")
        own = ("--own", "2000000", "--persist-every", "3", "--keep", str(KEEP))
        entry = (str(SCRIPT), str(self.job.folder), *own)
        node = self.job.start(*flags, nodes="2", nproc=1, entry=entry, name=f"node{number}")
        if number == 0:
            node.master()
        return node

    def kill(self, victim: str, strike: str) -> None:
        """One part, in the midst of something; wait until training goes on."""
        committed = self.committed()
        if strike == "restore":
            self.strike("rank", "")
            victim = (
                "agent" if victim in ("flusher", "courier") else victim
            )  # others may not be there
        self.strike(victim, strike)
        number = self.job.round()
        if victim in ("flusher", "courier", "master"):
            self.goes_on(number - 1)
        else:
            self.goes_on(number)
        self.check(committed)

    def strike(self, victim: str, strike: str) -> None:
        node = self.random.choice(self.nodes)
        find: dict[str, Callable[[], int]] = {
            "rank": lambda: self.random.choice(self.job.told("start", round=self.job.round())).pid,
            "flusher": lambda: node.part("elastic-flusher"),
            "courier": lambda: node.part("elastic-courier"),
            "agent": node.agent,
            "master": self.nodes[0].master,
            "guardian": lambda: self.nodes[1].guardian,
        }
        self.moments.refresh(self.nodes)
        with self.moments.during(strike) if strike else nullcontext():
            pids = [find[victim]()] if victim in find else []
            threading.Event().wait(self.random.uniform(0, 0.002 if strike else 0.3))
            under_way = self.moments.under_way()
            processes.kill(*pids)
            while victim == "all" and (
                left := self.job.left()
            ):  # also what a part that dies starts
                processes.kill(*(process.pid for process in left))
        self.kills += 1
        self.hits.update((victim, kind) for kind in under_way or {"nothing"})
        if victim == "guardian":
            assert self.nodes[1].exit_code() == -signal.SIGKILL
            self.nodes[1] = self.start(1)
        elif victim == "all":
            for node in self.nodes:
                node.process.wait()
            self.nodes = [self.start(0), self.start(1)]

    def goes_on(self, number: int) -> None:
        """Two more steps of both ranks, in a round after that one."""
        had = {rank: len(self.job.told("step", rank=rank)) for rank in range(2)}

        def both() -> bool:
            now = {rank: self.job.told("step", rank=rank) for rank in range(2)}
            return all(
                len(now[rank]) >= had[rank] + 2 and now[rank][-2].round > number for rank in now
            )

        self.job.wait_for(f"two more steps in a round after {number}", both)

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

    def table(self) -> str:
        """What was hit, a line for each part."""
        kinds = (*KINDS, "nothing")
        lines = [f"{self.kills} kills{'':>7}" + "".join(f"{kind:>12}" for kind in kinds)]
        for victim in dict.fromkeys(VICTIMS):
            counts = "".join(f"{self.hits[victim, kind]:>12}" for kind in kinds)
            lines.append(f"{victim:>16}{counts}")
        return "\n".join(lines)


def kill_at_random(job: Job, count: int) -> Run:
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    run = Run(job, seed)
    job.wait_for_steps(2, count=4)
    victims, strikes = (
        [kinds[number % len(kinds)] for number in range(count)] for kinds in (VICTIMS, STRIKES)
    )
    run.random.shuffle(victims)
    run.random.shuffle(strikes)
    for victim, strike in zip(victims, strikes, strict=True):
        if run.kills < count:
            run.kill(victim, strike)
    print(run.table())
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
    return run


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(len(VICTIMS), marks=pytest.mark.timeout(900)),
        *(pytest.param(many, marks=pytest.mark.soak) for many in (100, 1000)),
    ],
)
def test_kills_at_random_moments(job: Job, count: int) -> None:
    run = kill_at_random(job, count)
    assert {"save", "restore"} <= {kind for _, kind in run.hits}, run.table()
