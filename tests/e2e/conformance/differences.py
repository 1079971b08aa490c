"""The deliberate differences: each has a row, by its id, in docs/torchrun.md, and a witness case."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from .normalise import ABSENT, Delta


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What may differ, where, and a case in which it is seen to."""

    id: str
    keys: str  # a pattern that the whole key matches
    witness: str  # a case that shows it
    cases: str = ".*"  # a pattern that the whole case name matches
    only_added: bool = False  # ours has the key, torchrun does not
    forked: bool = False  # seen only when ranks are forked
    shows: tuple[str, ...] = ()  # keys that must differ in the witness; else any
    when: Callable[[Delta], bool] = lambda delta: True  # what else must hold

    def explains(self, case: str, delta: Delta, forked: bool) -> bool:
        """Whether this row accounts for `delta` in `case`."""
        if (self.only_added and delta.theirs != ABSENT) or (self.forked and not forked):
            return False
        named = re.fullmatch(self.cases, case) and re.fullmatch(self.keys, delta.key)
        return bool(named) and self.when(delta)

    def shown_by(self, deltas: list[Delta]) -> bool:
        """Whether it is seen among `deltas` of its witness."""
        seen = {d.key for d in deltas if self.explains(self.witness, d, self.forked)}
        return bool(seen) and seen >= set(self.shows)


PAGE = "/memfd:elastic-page (deleted)"
STACKS = "/memfd:elastic-stacks (deleted)"
RANK = r"rank\[.*\]"
RUN = rf"{RANK}\..*|node0\.(exit|stdout|stderr\.(ranks|omp_banner))|log\.attempt_0(/.*)?"
RESTART_COUNT = "env.TORCHELASTIC_RESTART_COUNT"


def _hooked(delta: Delta) -> bool:
    """Ours goes first on PYTHONPATH, and theirs follows unchanged."""
    return bool(delta.ours == f"<root>/elastic/agent/startup:{delta.theirs}")


def _page_and_socket(delta: Delta) -> bool:
    """Descriptors 200 and 201 come on top, what mapping the page duplicates, and a file for stacks, and no other."""
    if ABSENT in (delta.theirs, delta.ours):
        return False
    rest = {
        fd: name for fd, name in delta.ours.items() if fd != "201" and name not in (PAGE, STACKS)
    }
    return bool(rest == delta.theirs)


def _an_address(delta: Delta) -> bool:
    return bool(re.fullmatch(r"\d+\.\d+\.\d+\.\d+|[0-9a-f:]+", delta.ours))


def _refused(delta: Delta) -> bool:
    """Ours ended with a usage error, and no rank has run."""
    return delta.ours in (2, ABSENT, [], False)


def _only_ours_ran(delta: Delta) -> bool:
    """torchrun ended with a traceback, and ours well."""
    return (delta.theirs, delta.ours) == (1, 0) or delta.theirs in (ABSENT, [])


def _once_more(delta: Delta) -> bool:
    """Ours, and not torchrun, started these ranks again, which say so; and the job ended well."""
    if delta.key.endswith(RESTART_COUNT):
        return (delta.theirs, delta.ours) == (ABSENT, "1")
    if isinstance(delta.theirs, list):
        return bool(delta.ours == sorted(2 * delta.theirs))
    return (delta.theirs, delta.ours) == (1, 0) or bool(delta.theirs == ABSENT)


def _said(delta: Delta) -> bool:
    """Ours names what it has no use of; torchrun printed its events."""
    said = (
        "--monitor-interval 0.2, --start-method fork, --event-log-handler console, --rdzv-conf mine"
    )
    return any(line.endswith(f"without effect here: {said}") for line in delta.ours) and any(
        "torchelastic.worker.status" in line for line in delta.theirs
    )


def _killed_at_once(delta: Delta) -> bool:
    """torchrun lets ranks have another signal, and half a minute."""
    if delta.key == "lasted":
        return bool(delta.theirs != "as meant" and delta.ours == "as meant")
    return bool(delta.theirs == [*delta.ours, "SIGTERM"])


def _hole(delta: Delta) -> bool:
    """The beginning of the file takes no room, and the rest is as it was."""
    hole = len(delta.ours) - len(delta.ours.lstrip("\0"))
    return hole > 0 and bool(delta.theirs[hole:] == delta.ours[hole:])


def _half_as_often(delta: Delta) -> bool:
    """Rounds 0 to 2 are alike, and 3 to 5 are not there."""
    if isinstance(delta.theirs, list) and isinstance(delta.ours, list):
        return sorted(2 * delta.ours) == delta.theirs
    round_ = re.search(r"attempt_(\d+)|(\d+)\]", delta.key)
    return round_ is not None and int(round_[1] or round_[2]) > 2 and delta.ours == ABSENT


DIFFERENCES = (
    Difference(id="console", keys=r"node\d\.stderr\.launcher", witness="exit_3"),
    Difference(
        id="usage", keys=r"node0\.(exit|stderr\.omp_banner)", witness="bad_nproc",
        when=lambda delta: (delta.theirs, delta.ours) in ((1, 2), (True, False)),
        cases=r"(pet_)?bad\w*|zero_nproc|nproc_gpu|nnodes_\w+|negative_restarts|module_and_no_python"
        "|launch_no_python",
    ),
    Difference(
        id="unknown-signal", keys=RUN, cases="bad_signal", witness="bad_signal", when=_refused,
        shows=("node0.exit",),
    ),
    Difference(
        id="logs-specs", keys=RUN, cases="logs_specs", witness="logs_specs", when=_refused,
        shows=("node0.exit",),
    ),
    Difference(
        id="backends", keys=RUN, cases="rdzv_(plug_in|etcd)", witness="rdzv_plug_in",
        when=_refused, shows=("node0.exit",),
    ),
    Difference(
        id="without-effect", keys=r"node0\.stderr\.launcher", cases="events", witness="events",
        when=_said,
    ),
    Difference(
        id="monitor-interval", keys="lasted", cases="monitor_interval",
        witness="monitor_interval", when=lambda delta: delta.ours == "as meant",
    ),
    Difference(id="help", keys=r"node\d\.stdout", cases="help", witness="help"),
    Difference(
        id="elastic-variables", keys=RANK + r"\.env\.ELASTIC_\w+", witness="env", only_added=True
    ),
    Difference(
        id="run-path", cases="(launch_)?run_path.*", witness="run_path",
        keys=RANK + r"\.(?!argv|cwd|env|name|umask)\w+",
    ),
    Difference(id="hook", keys=RANK + r"\.env\.PYTHONPATH", witness="env", when=_hooked),
    Difference(id="excepthook", keys=RANK + r"\.excepthook", witness="env"),
    Difference(id="page", keys=RANK + r"\.fds", witness="env", when=_page_and_socket),
    Difference(
        id="resolver", keys=RANK + r"\.env\.RES_OPTIONS", witness="env", only_added=True
    ),
    Difference(
        id="recorder", witness="env", only_added=True,
        keys=RANK + r"\.env\.(TORCH_FR_BUFFER_SIZE|TORCH_NCCL_ENABLE_TIMING)",
    ),
    Difference(
        id="address", keys=RANK + r"\.env\.MASTER_ADDR", witness="env", when=_an_address
    ),
    Difference(
        id="store-port", keys=RANK + r"\.env\.MASTER_PORT", witness="megatron",
        when=lambda delta: delta.ours == "<some port>",
    ),
    Difference(
        id="error-file", keys="error_file", witness="error_file", only_added=True
    ),
    Difference(id="run-folder", keys="log_folders|log_beside", witness="env"),
    Difference(
        id="rank-folders", keys=RANK + r"\.folder_named_by", witness="static_two",
        when=lambda delta: (delta.theirs, delta.ours) == ("local rank", "global rank"),
    ),
    Difference(id="parent", keys=RANK + r"\.parent", witness="env"),
    Difference(
        id="torch-preloaded", keys=RANK + r"\.(torch_preloaded|os_threads)", witness="env",
        forked=True,
    ),
    Difference(
        id="title", keys=RANK + r"\.cmdline", witness="env", forked=True,
        when=lambda delta: delta.ours[0] == " ".join(delta.theirs),
    ),
    Difference(
        id="outermost-frame", keys=RANK + r"\.outermost_frame", witness="env", forked=True
    ),
    Difference(
        id="two-digit-ranks", cases="tee_two_digits", witness="tee_two_digits",
        keys=rf"{RANK}\..*|node0\.(exit|stdout|stderr\.ranks)"
        r"|log\.attempt_0(/\d+)?|log\.attempt_0/10/stdout\.log",
        when=_only_ours_ran, shows=("node0.exit", "log.attempt_0/10/stdout.log"),
    ),
    Difference(
        id="log-limit", keys=r"log\.attempt_0/1/stdout\.log", cases="log_limit",
        witness="log_limit", when=_hole,
    ),
    Difference(
        id="log-keep", keys=r"log\.attempt_1(/[01](/stdout\.log)?)?", cases="log_keep",
        witness="log_keep", when=lambda delta: delta.ours == ABSENT,
    ),
    Difference(
        id="whose-fault", cases="killed_first|terminated_first", witness="killed_first",
        keys=r"rank\[0\.[01]\.1\]\..*|log\.attempt_1(/[01])?|node0\.(exit|stdout|stderr\.ranks)",
        when=_once_more,
        shows=("node0.exit", f"rank[0.0.1].{RESTART_COUNT}", f"rank[0.1.1].{RESTART_COUNT}"),
    ),
    Difference(
        id="timers", keys=r"node0\.exit|ranks_left", cases="timer_expires",
        witness="timer_expires", shows=("node0.exit", "ranks_left"),
        when=lambda delta: (delta.theirs, delta.ours) in ((137, 1), (["pid.0.0.0"], [])),
    ),
    Difference(
        id="deterministic", keys=rf"{RANK}.*|log\.attempt_.*|node0\.(stdout|stderr\.ranks)",
        cases="same_failure", witness="same_failure", when=_half_as_often,
    ),
    Difference(
        id="failure-grace", keys=r"signals\[.*\]", cases="exit_3_other_saves|segv",
        witness="exit_3_other_saves",
    ),
    Difference(
        id="second-interrupt", keys=r"lasted|signals\[0\.[01]\.[01]\]", cases="second_sigint",
        witness="second_sigint", when=_killed_at_once, shows=("lasted",),
    ),
    Difference(
        id="leftovers", keys="children_left", cases="child_left_.*",
        witness="child_left_by_failure",
    ),
    Difference(
        id="restart-everywhere", cases="static_restart", witness="static_restart",
        keys=r"rank\[0\.0\.1\]\..*|log\.attempt_1/0|node0\.(stdout|stderr\.ranks)",
        when=_once_more, shows=(f"rank[0.0.1].{RESTART_COUNT}", "node0.stdout"),
    ),
    Difference(
        id="failure-everywhere", keys=r"node\d\.exit", cases="static_one_fails",
        witness="static_one_fails", when=lambda delta: (delta.theirs, delta.ours) == (999, 1),
    ),
    Difference(
        id="restart-count", cases="c10d_restart", witness="c10d_restart",
        keys=r"rank\[0\.0\.1\]\..*|log\.attempt_1/0", when=_once_more,
        shows=(f"rank[0.0.1].{RESTART_COUNT}",),
    ),
)  # fmt: skip


def explained(case: str, delta: Delta, forked: bool) -> Difference | None:
    """The row that accounts for `delta`, or None."""
    return next((row for row in DIFFERENCES if row.explains(case, delta, forked)), None)
