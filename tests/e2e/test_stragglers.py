"""Ranks and links that are slow, in real processes that are throttled, and networks that are limited."""

import json
import os
import re

import pytest

from tests.e2e.harness import FORK, ROOT, Job, throttle
from tests.e2e.harness.network import Network
from tests.e2e.harness.throttle import throttled

SCRIPTS = ROOT / "tests" / "e2e" / "harness" / "scripts"
SCRIPT, GPU_SCRIPT = SCRIPTS / "stragglers.py", SCRIPTS / "slow_gpus.py"
INTERVAL = "2"
SETTLED = 12
"""Intervals of a round after which a verdict was possible."""

needs_throttle = pytest.mark.skipif(bool(throttle.missing()), reason=throttle.missing() or "-")


def start(
    job: Job, *flags: str, launchers: int = 2, products: int = 200, network: Network | None = None
) -> int:
    """Nodes of two ranks; the round that they are in. A step: a sleep of 200 ms, which other work for these cores makes
    little longer, and some 20 ms of work."""
    entry = (str(SCRIPT), str(job.folder), "0.2", str(products), "25600")
    flags = (FORK, "--straggler-interval", INTERVAL, *flags)
    for number in range(launchers):
        if network is None:
            job.start(*flags, nodes="2", nproc=2, entry=entry)
            continue
        job.address = network.address(0)
        job.start(
            *flags, nodes="2", nproc=2, entry=entry, prefix=network.on(number),
            environ={"GLOO_SOCKET_IFNAME": "eth0"},
        )  # fmt: skip
    return job.wait_for_steps(4)


def verdicts(job: Job) -> list[str]:
    return [event for event in job.events() if "Straggling:" in event]


def passes(job: Job, intervals: int) -> None:
    """Wait until the ranks have trained for so long."""
    first = job.told("step", rank=0)[-1].at
    job.wait_for(
        f"{intervals} intervals",
        lambda: job.told("step", rank=0)[-1].at > first + intervals * int(INTERVAL) or None,
    )


@pytest.mark.soak
def test_where_nothing_is_slow_nobody_is_named(job: Job) -> None:
    start(job, products=1)
    passes(job, 2 * SETTLED)
    assert verdicts(job) == []
    job.finish()
    job.ends(0)


@needs_throttle
def test_a_throttled_rank_is_named_until_it_is_throttled_no_more(job: Job) -> None:
    number = start(job)
    with throttled([job.rank(number, 3)], 0.1):
        said = job.wait_for_event("rank 3 on node")
        assert re.search(r"Straggling: rank 3 on node\d computes ", said), said
        assert "slow: rank 3 on node" in job.ctl("status")
    job.wait_for_event("no longer: rank 3 on node")
    job.finish()
    job.ends(0)
    assert job.round() == number, "it was only told of"


@pytest.mark.soak
@needs_throttle
def test_a_spare_takes_the_place_of_a_throttled_node(job: Job) -> None:
    number = start(job, "--exclude-straggler", "--exit-codes", "detailed", launchers=3)
    passes(job, 1)
    first = {line.rank: line.pid for line in job.told("start", round=number)}
    with throttled([first[2], first[3]], 0.2):
        said = job.wait_for_event("drains:")
        node = re.search(r"(node\d) drains: all 2 ranks on \1 compute ", said)
        assert node, said
        after = job.wait_for_steps(4, after=number)
    assert after == number + 1
    job.finish()
    codes = {each.name: each.exit_code() for each in job.nodes}
    assert codes == {each.name: 212 if each.name == node[1] else 0 for each in job.nodes}
    assert job.report()["restarts_by_cause"] == {"asked for": 1}


@pytest.mark.netns
def test_a_limited_link_is_named(job: Job, network: Network) -> None:
    start(job, products=1, network=network)
    passes(job, SETTLED)
    assert verdicts(job) == []
    network.limit(1, "5mbit")
    job.wait_for_event("transfers over the link between node0 and node1 take ")
    assert all("transfers over" in event for event in verdicts(job))
    job.finish()
    job.ends(0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ({"products": 100}, "on the device: its host is ahead of it"),
        ({"sleep": 0.05}, "for the device waits for its host"),
    ],
)
def test_of_a_rank_on_a_gpu_its_device_or_its_host_is_named(
    job: Job, fault: dict[str, float], part: str
) -> None:
    """Much more to do, or data that come late. On one GPU two ranks share it, and who has more to do is alone in its
    backward pass: with twice as much it would take no longer than the other's."""
    entry = (str(GPU_SCRIPT), str(job.folder), "4096", "20")
    job.start("--straggler-interval", INTERVAL, nproc=2, entry=entry)
    job.wait_for_steps(2)
    passes(job, SETTLED)
    assert verdicts(job) == []
    (job.folder / "fault").write_text(json.dumps(fault))
    os.replace(job.folder / "fault", job.folder / "fault-1")
    said = job.wait_for_event("Straggling:")
    assert re.search(rf"rank 1 on node0 computes .*{part}", said), said
    (job.folder / "fault-1").unlink()
    job.wait_for_event("no longer: rank 1 on node0")
    job.finish()
    job.ends(0)
