"""Short ways to say what probes of nodes find."""

from typing import Any

from elastic.master import events as ev
from elastic.master.events import NodeId
from elastic.master.policy import Policy
from tests.master.builders import Core


def begun(*nodes: str, precheck: str = "quick", **policy: Any) -> Core:
    """They have attached, and are being probed."""
    policy = {"min_nodes": 1, "max_nodes": len(nodes), "verdict_age": 1000.0, **policy}
    core = Core(Policy(precheck=precheck, **policy))
    core.attach(*nodes, slots=1, at=0.0)
    return core


def answer(
    core: Core, node: str, state: str = "ok", *, at: float, number: int | None = None
) -> None:
    known = core.job.nodes[NodeId(node)]
    asked = known.probe.number if known.probe is not None else 0
    health = ev.Health(
        node_id=known.node_id, incarnation=known.incarnation,
        number=asked if number is None else number, level=core.policy.precheck, state=state,
        what="matmul: gpu3: 1 elements differ" if state == "faulty" else "", seconds=1.5,
    )  # fmt: skip
    core.feed(ev.Probed((health,)), at)


def asked(core: Core, *nodes: str) -> list[bool]:
    """Who is to probe itself."""
    orders = [core.order(node).probe for node in nodes]
    return [probe is not None and probe.pairs is None for probe in orders]


def in_pairs(core: Core) -> list[str]:
    """Who is being tested with others."""
    return [n for n, node in core.job.nodes.items() if node.probe is not None and node.probe.pairs]


def pair(core: Core, *broken: str, at: float, silent: str = "") -> None:
    """All that are asked have been tested; broken: nodes, or links as "a-b", that do not work; silent: who does not
    answer."""
    said = []
    for node_id in in_pairs(core):
        node = core.job.nodes[NodeId(node_id)]
        assert node.probe is not None
        assert node.probe.pairs is not None
        tests = [
            ev.PairTest(passed=not {a, b, f"{a}-{b}", f"{b}-{a}"} & set(broken), what="no allgather", gather=0.01)
            for a, b in node.probe.pairs.pairs
            if node_id in (a, b)
        ]  # fmt: skip
        if node_id not in silent:
            said.append(
                ev.Pairing(
                    node_id=node.node_id,
                    incarnation=node.incarnation,
                    number=node.probe.number,
                    state="ok",
                    matmul=(0.1,),
                    tests=tuple(tests),
                )
            )
    core.feed(ev.Paired(tuple(said)), at)
