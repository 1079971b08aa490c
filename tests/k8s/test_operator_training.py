"""A GPT in exact mode as an ElasticJob, through what people do to it: its steps are those of the run that was left
alone, bit for bit, and none is done twice where its ranks had time to save."""

import logging
from pathlib import Path
from typing import Any

import pytest

from elastic.proto.elasticjob import JobState
from elastic.trainer.watch import jsonl
from tests.k8s.cluster import Cluster
from tests.k8s.operated import Job, operated
from tests.trainer import launch
from tests.trainer.launch import finish, steps, training

log = logging.getLogger(__name__)
STEPS, KILLS = 130, 12
LENGTH = f"--train-iters={STEPS}"


class Trained(Job):
    """One that trains a small GPT; nothing is saved but in memory."""

    def __init__(self, cluster: Cluster, folder: Path, pods: int, length: str, start: str) -> None:
        """start: how its ranks do (--rank-start)."""
        script = training(folder, "scaled", length, script=("-m", "tests.k8s.paced"))
        self.metrics = folder / "scaled.jsonl"
        super().__init__(
            cluster,
            folder,
            train=(f"--rank-start={start}", *script),
            worker={"replicas": pods},
            workingDir=str(Path(__file__).parents[2]),
        )

    def lines(self) -> list[dict[str, Any]]:
        """Of each step that was done, in order, a repeated one too."""
        if not self.metrics.exists():
            return []
        return [line for line in jsonl.read(self.metrics) if line["kind"] == "step"]

    def step(self) -> int:
        return max((int(line["iteration"]) for line in self.lines()), default=0)

    def told(self) -> JobState:
        found = self.state()
        assert found is not None
        return found

    def cost(self, pod: str) -> float:
        """Seconds in which nobody trained since it was lost."""
        found = (one.downtime_seconds for one in self.told().last_failures if one.pod == pod)
        return next(found, None) or 0.0

    def lose(self, victim: str) -> float:
        """A pod, at once; until four train again. Returns the seconds in which nobody did."""
        self.space.client.delete(self.space.path("pods", victim), gracePeriodSeconds=0)
        self.wait("it is replaced", lambda: victim not in self.names() and len(self.names()) == 4)
        self.wait("3 train", lambda: (now := self.state()) is not None and now.world_size != 4)
        self.wait_world(4)
        self.wait("what the loss has cost is told", lambda: self.cost(victim) > 0)
        return self.cost(victim)

    def wait_world(self, ranks: int) -> int:
        """Until so many have done steps; the last of these."""

        def theirs() -> bool:
            return (state := self.state()) is not None and state.world_size == ranks

        self.wait(f"there are {ranks}", theirs)
        told = len(self.lines())
        self.wait(f"{ranks} train", lambda: theirs() and len(self.lines()) > told + 3)
        return self.step()


@pytest.mark.timeout(900)  # alone it takes 100 to 200 s of two cores
def test_scaled_lost_and_suspended_it_ends_with_the_same_bits(
    crd: None, cluster: Cluster, tmp_path: Path
) -> None:
    with operated(cluster.namespace, tmp_path):
        job = Trained(cluster, tmp_path, 3, LENGTH, "auto")
        job.wait_world(3)
        job.scale(2)
        job.wait_world(2)
        job.scale(4)
        job.wait_world(4)
        victim = job.names()[-1]
        standing = job.told().round
        job.lose(victim)
        assert job.told().round == standing + 2, "one rendezvous for each change"
        job.wait("what is in memory is told", lambda: job.told().checkpoint.memory_step is not None)
        job.edit(suspend=True)
        job.wait("it is suspended", lambda: job.holds("Suspended"))
        assert (job.names(), job.status()["phase"]) == ([], "Suspended")
        job.wait("its master says so", lambda: job.told().state == "Suspended")
        before, told = job.lines(), job.told()
        assert told.checkpoint.memory_step is None
        assert told.checkpoint.persisted_step == before[-1]["iteration"]
        assert told.checkpoint.persisted_at is not None
        assert job.cost(victim) > 0
        assert told.goodput is not None
        assert 0 < told.goodput < 1
        job.edit(suspend=False)
        job.wait("it goes on", lambda: len(job.lines()) > len(before))
        first = job.lines()[len(before)]
        assert first["iteration"] == before[-1]["iteration"] + 1, "steps are lost"
        job.wait("it is complete", lambda: job.holds("Complete"))
    finish(launch.start(tmp_path, "whole", LENGTH, nproc=2))
    whole = steps(tmp_path, "whole")
    assert sorted(whole) == sorted(steps(tmp_path, "scaled"))
    assert whole == steps(tmp_path, "scaled")


@pytest.mark.soak
@pytest.mark.parametrize("start", ["auto", "fork"])
def test_pods_are_deleted_again_and_again(
    crd: None, cluster: Cluster, tmp_path: Path, start: str
) -> None:
    """One round without each, and one with its replacement. How long nobody trained is logged (--log-cli-level=INFO)."""
    length = f"--train-iters={40 * KILLS}"
    with operated(cluster.namespace, tmp_path):
        job = Trained(cluster, tmp_path, 4, length, start)
        job.wait_world(4)
        for kill in range(KILLS):
            victim = job.names()[-1 - kill % 4]
            log.info("%s is deleted: nobody trains for %.2f s", victim, job.lose(victim))
        job.wait("it is complete", lambda: job.holds("Complete"))
    sizes = list({line["round"]: line["world_size"] for line in job.lines()}.values())
    assert sizes[sizes.index(4) :] == [4, *(3, 4) * KILLS]
    finish(launch.start(tmp_path, "whole", length, nproc=2))
    assert steps(tmp_path, "whole") == steps(tmp_path, "scaled")
