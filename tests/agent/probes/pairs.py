"""Pair probes as processes: what they print, and what it says of two nodes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from elastic.master.events import NodeId
from elastic.master.grouping import Group
from elastic.master.pair_results import Account, Outcome, Test

OUTCOMES = {
    "passed": Outcome.PASSED,
    "failed": Outcome.FAILED,
    "timed out": Outcome.TIMED_OUT,
    "not tested": Outcome.FAILED,
}


class Probe:
    """One process of a group."""

    def __init__(
        self, store: str, rank: int, world: int, *flags: str, prefix: Sequence[str] = ()
    ) -> None:
        """store: at which all pairs meet, or each, by commas."""
        count = flags[flags.index("--pairs") + 1].count(",") + 1 if "--pairs" in flags else 1
        stores = store if "," in store else ",".join([store] * count)
        me = (sys.executable, "-m", "elastic.agent.probes.pair")
        who = ("--stores", stores, "--rank", str(rank), "--world", str(world))
        self.process = subprocess.Popen(
            (*prefix, *me, *who, *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, seconds: float) -> dict[str, Any]:
        """The one line that it prints; seconds: far more than its deadline."""
        try:
            out, error = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        lines = out.splitlines()
        assert len(lines) == 1, f"it printed {out!r}, and {error!r} as errors"
        said: dict[str, Any] = json.loads(lines[0])
        assert said.keys() == {"probe", "ok", "what", "figures"}
        assert said["ok"] == (said["what"] == "") == (self.process.returncode == 0), said
        return said


def numbers(group: Group) -> str:
    """`--pairs` of a group."""
    number = {node_id: n for n, node_id in enumerate(group.nodes)}
    return ",".join(f"{number[a]}-{number[b]}" for a, b in group.pairs)


def told_of(group: Group, said: dict[NodeId, dict[str, Any]]) -> list[Test]:
    """What the processes of a group said, one a node, as the master is told."""
    left = {node_id: list(one["figures"]["pairs"]) for node_id, one in said.items()}
    tests: list[Test] = []
    for a, b in group.pairs:
        accounts = [_account(node_id, said[node_id], left[node_id]) for node_id in (a, b)]
        tests.append(Test(a=accounts[0], b=accounts[1]))
    return tests


def _account(node_id: NodeId, said: dict[str, Any], left: list[dict[str, Any]]) -> Account:
    figures = said["figures"]
    matmul = (figures["matmul_s"],) if "matmul_s" in figures else ()
    if figures["alone"]:
        outcome = Outcome.FAILED_ALONE
        return Account(node_id=node_id, outcome=outcome, what=said["what"], matmul=matmul)
    if not left:  # its time was over before
        outcome = Outcome.TIMED_OUT
        return Account(node_id=node_id, outcome=outcome, what=said["what"], matmul=matmul)
    pair = left.pop(0)
    return Account(
        node_id=node_id,
        outcome=OUTCOMES[pair["outcome"]],
        what=pair["what"],
        matmul=matmul,
        gather=pair.get("gather_s", 0.0),
    )
