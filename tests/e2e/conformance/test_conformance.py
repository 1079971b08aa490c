"""elastic-run is torchrun, but for the rows of docs/torchrun.md.

`python -m tests.e2e.conformance self` checks the corpus itself, torchrun against torchrun.
"""

import re
from functools import cache

import pytest

from .cases import CASES, Case
from .differences import DIFFERENCES, Difference, explained
from .launchers import ELASTIC_FORKED, ELASTIC_SPAWNED, TORCHRUN, TORCHRUN_WARM
from .normalise import Delta, Flat, compare, normalise
from .runner import ROOT, Launcher, run

needs_elastic_run = pytest.mark.skipif(
    not (ROOT / "elastic" / "run.py").exists(), reason="there is no elastic-run in this checkout"
)
QUICK = {"env", "module", "macro", "tee_3", "exit_3", "recorded_raise", "sigterm", "static_two"}
FORKED = [
    pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.soak)
    for name, case in CASES.items()
    if case.forks
]


@cache
def observed(name: str, launcher: Launcher) -> Flat:
    """Each case once a launcher and session."""
    return normalise(run(CASES[name], launcher))


def deltas(case: Case, theirs: Launcher, ours: Launcher) -> list[Delta]:
    """Where the two launchers disagree."""
    return compare(observed(case.name, theirs), observed(case.name, ours))


def unexplained(case: Case, found: list[Delta], forked: bool) -> str:
    """What no row accounts for, as a report; empty if all is accounted for."""
    return "\n".join(str(d) for d in found if explained(case.name, d, forked) is None)


@needs_elastic_run
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_spawned(case: Case) -> None:
    report = unexplained(case, deltas(case, TORCHRUN, ELASTIC_SPAWNED), forked=False)
    assert not report, report


@needs_elastic_run
@pytest.mark.parametrize("case", FORKED)
def test_forked(case: Case) -> None:
    report = unexplained(case, deltas(case, TORCHRUN_WARM, ELASTIC_FORKED), forked=True)
    assert not report, report
    ours = observed(case.name, ELASTIC_FORKED)
    preloaded = [value for key, value in ours.items() if key.endswith(".torch_preloaded")]
    assert all(preloaded), "ranks were spawned, so this showed nothing about forks"


@needs_elastic_run
@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: row.id)
def test_difference_is_observed(row: Difference) -> None:
    case = CASES[row.witness]
    pair = (TORCHRUN_WARM, ELASTIC_FORKED) if row.forked else (TORCHRUN, ELASTIC_SPAWNED)
    found = deltas(case, *pair)
    assert any(row.explains(case.name, delta, row.forked) for delta in found), (
        f"{row.id} is gone: drop it here and in docs/torchrun.md"
    )


def test_differences_are_documented() -> None:
    text = (ROOT / "docs" / "torchrun.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE)
    assert rows == [row.id for row in DIFFERENCES]


def test_witnesses_exist() -> None:
    assert {row.witness for row in DIFFERENCES} <= CASES.keys()


def test_torchrun_agrees_with_itself() -> None:
    """Two runs differ in ports, pids, ids and folders, all of which are normalised away."""
    case = CASES["c10d_two_id"]
    theirs, again = (normalise(run(case, TORCHRUN)) for _ in range(2))
    assert compare(theirs, again) == []
    assert theirs["node0.exit"] == theirs["node1.exit"] == 0
    assert {theirs[f"rank[{n}.{r}.0].env.WORLD_SIZE"] for n, r in ("00", "01", "12", "13")} == {"4"}


def test_compare_reports_what_one_side_lacks() -> None:
    assert [d.key for d in compare({"a": 1, "b": 2}, {"b": 3, "c": 4})] == ["a", "b", "c"]
