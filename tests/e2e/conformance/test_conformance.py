"""elastic-run is torchrun, but for the rows of docs/torchrun.md.

`python -m tests.e2e.conformance self` checks the corpus itself, torchrun against torchrun.
"""

import fcntl
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from .cases import CASES, Case
from .differences import DIFFERENCES, Difference, explained
from .launchers import ELASTIC_FORKED, ELASTIC_SPAWNED, TORCHRUN, TORCHRUN_WARM
from .normalise import Delta, Flat, compare, normalise
from .runner import ROOT, Launcher, run

pytestmark = pytest.mark.timeout(600)  # a case has limits of its own, meant for a busy machine

needs_elastic_run = pytest.mark.skipif(
    not (ROOT / "elastic" / "run.py").exists(), reason="there is no elastic-run in this checkout"
)
QUICK = {
    "env", "exit_3",
}  # fmt: skip
"""What is also run forked by default."""
SOAK = {
    "bare", "nproc_cpu", "underscores", "module_long", "absolute_path", "no_python_binary",
    "pet_overridden", "pet_bad", "omp_one_rank", "nccl_variable_set", "signals_exported",
    "virtual_local_rank", "redirects_0", "redirects_1", "redirects_2", "tee_1", "tee_2",
    "tee_map", "logs_in_tmp", "log_dir_null_tee", "filter_ranks_tee", "filter_ranks_redirects",
    "duplicate_filters_no_tee", "exit_3_one", "restart_once", "recorded_exit",
    "sighup_in_rendezvous", "sigint_in_rendezvous", "static_two_endpoint", "cloud_two_expanded",
    "c10d_two", "static_two_allreduce", "static_one_fails", "bad_integer", "ambiguous_option",
    "nnodes_zero", "missing_binary", "run_path_and_no_python", "equals", "omp_set",
    "unknown_option", "module_and_no_python", "redirects_and_tee", "nnodes_backwards",
    "zero_nproc", "missing_module", "static_two_uneven", "terminated_first", "auto_c10d",
    "recorded_zero", "sub_folder", "negative_restarts", "bad_backend", "exit_negative",
    "restarts_used_up", "raises", "rdzv_id", "child_left_by_success", "no_script", "text",
    "bad_redirects", "second_sigint", "rdzv_etcd",
    "timers_off", "launch_module", "launch_run_path", "launch_use_env_short", "launch_unknown_option", "use_env",
    "abbreviations", "script_args", "python_exec", "role", "virtual_local_rank_devices",
    "standalone_overrides", "inherited_rank_variables", "timers_given", "launch_use_env",
    "launch_use_env_underscore", "redirects_map", "log_dir_null", "log_dir_relative", "prefix",
    "filter_ranks", "duplicate_filters", "log_attempts", "exit_256", "sighup", "sigint",
    "sigquit", "sigusr1_handled", "sigterm_ignored", "c10d_range", "bad_rdzv_conf",
    "missing_script", "launch_no_python", "nproc_gpu", "no_python", "cloud_two",
    "c10d_two_id",
}  # fmt: skip
"""What is run only with -m soak: close relatives of cases that are run by default."""

Observed = Callable[[str, Launcher], Flat]


def _marked(cases: Iterable[Case], default: Callable[[str], bool]) -> list[object]:
    return [
        pytest.param(case, id=case.name, marks=() if default(case.name) else pytest.mark.soak)
        for case in cases
    ]


def _in_soak(row: Difference) -> bool:
    return row.witness in SOAK or (row.forked and row.witness not in QUICK)


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Observed:
    """What is seen of a case; each is run once a launcher and session, by whichever worker."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "conformance"
    shared.mkdir(exist_ok=True)

    def observe(name: str, launcher: Launcher) -> Flat:
        warm = "" if launcher.warm is None else ", warm"
        path = shared / f"{name}, {launcher.name}{warm}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _write(path, normalise(run(CASES[name], launcher)))
        flat: Flat = json.loads(path.read_text())
        return flat

    return observe


def _write(path: Path, flat: Flat) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(flat))
    part.rename(path)


def unexplained(name: str, found: list[Delta], forked: bool) -> str:
    """What no row accounts for, as a report; empty if all is accounted for."""
    return "\n".join(str(d) for d in found if explained(name, d, forked) is None)


@needs_elastic_run
@pytest.mark.parametrize("case", _marked(CASES.values(), lambda name: name not in SOAK))
def test_spawned(case: Case, observed: Observed) -> None:
    found = compare(observed(case.name, TORCHRUN), observed(case.name, ELASTIC_SPAWNED))
    report = unexplained(case.name, found, forked=False)
    assert not report, report


@needs_elastic_run
@pytest.mark.parametrize(
    "case", _marked((case for case in CASES.values() if case.forks), QUICK.__contains__)
)
def test_forked(case: Case, observed: Observed) -> None:
    ours = observed(case.name, ELASTIC_FORKED)
    preloaded = [value for key, value in ours.items() if key.endswith(".torch_preloaded")]
    assert all(preloaded), "ranks were spawned, so this showed nothing about forks"
    found = compare(observed(case.name, TORCHRUN_WARM), ours)
    report = unexplained(case.name, found, forked=True)
    assert not report, report


@needs_elastic_run
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.id, marks=pytest.mark.soak if _in_soak(row) else ())
        for row in DIFFERENCES
    ],
)
def test_difference_is_observed(row: Difference, observed: Observed) -> None:
    theirs, ours = (TORCHRUN_WARM, ELASTIC_FORKED) if row.forked else (TORCHRUN, ELASTIC_SPAWNED)
    found = compare(observed(row.witness, theirs), observed(row.witness, ours))
    assert row.shown_by(found), f"{row.id} is gone: drop it here and in docs/torchrun.md"


def test_differences_are_documented() -> None:
    text = (ROOT / "docs" / "torchrun.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE)
    assert rows == [row.id for row in DIFFERENCES]


def test_how_much_is_run_by_default_is_documented() -> None:
    text = (ROOT / "docs" / "torchrun.md").read_text()
    twice = sum(case.forks for case in CASES.values())
    assert f"runs {len(CASES)} command lines under both, {twice} of them twice" in text
    assert (
        f"`make test` runs {len(CASES) - len(SOAK)} of them afresh and {len(QUICK)} forked" in text
    )
    rare = " and ".join(f"`{row.id}`" for row in DIFFERENCES if _in_soak(row))
    assert f"all rows but {rare}; the others run only in `make soak`" in text


def test_what_no_comparison_shows_is_tested_elsewhere() -> None:
    text = (ROOT / "docs" / "torchrun.md").read_text()
    table = text.partition("## What differs that no comparison can show")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!torchrun|-).*\|$", table, re.MULTILINE)
    assert rows
    for row in rows:
        named = re.findall(r"`([\w/.]+)::(\w+)`", row)
        assert named, f"no test: {row}"
        for file, name in named:
            assert f"def {name}(" in (ROOT / file).read_text(), (file, name)


def test_a_rank_of_two_digits_has_its_streams_where_it_is_told(observed: Observed) -> None:
    ours = observed("tee_two_digits", ELASTIC_SPAWNED)
    assert ours["node0.exit"] == 0
    logs = [key for key in ours if re.fullmatch(r"log\.attempt_0/\d+/.*", key)]
    assert logs == ["log.attempt_0/10/stdout.log"]
    said = [f"@@ out 10 {line}" for line in ("first", "keep this", "last")]
    assert ours[logs[0]].splitlines() == said
    prefixed = [line for line in ours["node0.stdout"] if not line.startswith("@@")]
    assert prefixed == sorted(f"[default10]:{line}" for line in said)


def test_witnesses_exist() -> None:
    assert {row.witness for row in DIFFERENCES} | SOAK | QUICK <= CASES.keys()


def test_torchrun_agrees_with_itself(observed: Observed) -> None:
    """Two runs differ in ports, pids, ids and folders, all of which are normalised away."""
    theirs = observed("c10d_two_id", TORCHRUN)
    again = normalise(run(CASES["c10d_two_id"], TORCHRUN))
    assert compare(theirs, again) == []
    assert theirs["node0.exit"] == theirs["node1.exit"] == 0
    assert {theirs[f"rank[{n}.{r}.0].env.WORLD_SIZE"] for n, r in ("00", "01", "12", "13")} == {"4"}


def test_compare_reports_what_one_side_lacks() -> None:
    assert [d.key for d in compare({"a": 1, "b": 2}, {"b": 3, "c": 4})] == ["a", "b", "c"]
