"""The harness itself, where a mistake of its own would let ours pass."""

from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPT
from tests.e2e.harness.job import HEAD, Job, Node

OURS = f"""{HEAD}
  File "/x/elastic/agent/agent.py", line 1, in run
    raise RuntimeError
RuntimeError: a bug of ours
"""
RANKS = f"""{HEAD}
  File "{SCRIPT}", line 9, in <module>
    main()
elastic-run: another rank failed meanwhile
ValueError: asked to fail
"""
CAUSES = """
The above exception was the direct cause of the following exception:

"""
NAMES_THE_SCRIPT = f"[rank0]: Warning: {SCRIPT}:10: deprecated\n"


def prefixed(text: str) -> str:
    return "".join(f"[default0]:{line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("said", "own"),
    [
        ("", 0),
        (RANKS, 0),
        (RANKS + NAMES_THE_SCRIPT, 0),
        (prefixed(RANKS.replace("elastic-run: another rank failed meanwhile\n", "")), 0),
        (OURS, 1),
        (OURS + NAMES_THE_SCRIPT, 1),
        (OURS + RANKS, 1),
        (RANKS + OURS + RANKS + OURS, 2),
        (prefixed(OURS) + NAMES_THE_SCRIPT, 1),
        (OURS + CAUSES + RANKS, 0),
        (OURS + CAUSES + OURS, 1),
        (prefixed(OURS + CAUSES) + "elastic-run: a line\n" + prefixed(OURS), 1),
        (prefixed(OURS + CAUSES) + OURS + prefixed(RANKS), 1),
    ],
)
def test_a_traceback_of_ours_is_no_users(job: Job, said: str, own: int, tmp_path: Path) -> None:
    (tmp_path / "node0.err").write_text(said)
    node = Node.__new__(Node)
    node.job, node.name = job, "node0"
    assert len(job.own_tracebacks(node)) == own
