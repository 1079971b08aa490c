"""elastic-run's command line: torchrun's own, to the letter, and what we add to it."""

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import Std
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.torch_version import TorchVersion

from elastic import dlrover_flags, flags, values
from elastic.agent.logs.logs import of_rank
from elastic.options import Options, make_parser, parse
from elastic.parser import Flag
from elastic.proto.errors import UsageError

ROOT = Path(__file__).parents[2]


def options(line: str, environ: Mapping[str, str] | None = None) -> Options:
    return parse([*line.split(), "train.py"], environ or {})


def refusal(line: str, environ: Mapping[str, str] | None = None) -> str:
    """The one line that `elastic-run LINE train.py` is refused with."""
    code, text = outcome(lambda: options(line, environ))
    assert code == 2, f"{line} is accepted"
    usage, _, message = str(text).partition("elastic-run: error: ")
    assert usage.startswith("usage: ")
    assert message.count("\n") == 1
    return message.strip()


def outcome(call: Callable[[], object]) -> tuple[Any, object]:
    """What a call returns, or the status that it exits with and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            return None, call()
        except SystemExit as error:
            return error.code, printed.getvalue()


# torchrun's flags.


def torchrun_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    with mock.patch.dict(os.environ, environ, clear=True):
        parser: argparse.ArgumentParser = torchrun.get_args_parser()
    return parser


needs_torchrun_2_13 = pytest.mark.skipif(
    TorchVersion(torch.__version__) < TorchVersion("2.13"),
    reason="the flags are those of torchrun 2.13",
)
THEIRS = torchrun_parser({})
OURS = make_parser({})
DESTS = {action.dest for action in THEIRS._actions} - {"help"}


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[Any, object]:
    """torchrun's part of what a parser makes of a command line, or its error without the usage."""
    parse_args = getattr(parser, "parse", parser.parse_args)
    code, result = outcome(lambda: vars(parse_args(argv)))
    if isinstance(result, dict):
        return code, {dest: result.get(dest) for dest in DESTS}
    return code, str(result).rpartition("error: ")[2] if code else None


def test_every_flag_of_torchrun_is_here_as_it_is_there() -> None:
    def facts(parser: argparse.ArgumentParser) -> list[tuple[object, ...]]:
        return [
            (a.option_strings, a.dest, a.default, a.nargs, list(a.choices or []), a.required)
            for a in parser._actions
            if a.dest in DESTS
        ]

    assert facts(OURS) == facts(THEIRS)


@needs_torchrun_2_13
@pytest.mark.parametrize("action", THEIRS._actions, ids=lambda action: str(action.dest))
def test_each_prefix_means_what_torchrun_makes_of_it(action: argparse.Action) -> None:
    for name in action.option_strings:
        for prefix in (name[:length] for length in range(1, len(name) + 1)):
            for argv in ([prefix, "1", "train.py"], [f"{prefix}=1", "train.py"]):
                assert parsed(OURS, argv) == parsed(THEIRS, argv), argv


@needs_torchrun_2_13
def test_each_flag_of_ours_is_told_of_in_the_docs() -> None:
    text = (ROOT / "docs" / "elastic-run.md").read_text()
    assert [flag.name for flag in flags.OURS if f"`--{flag.name}" not in text] == []


@pytest.mark.parametrize("flag", [*flags.OURS, *dlrover_flags.FLAGS], ids=lambda flag: flag.name)
def test_our_flags_are_only_reached_by_their_whole_name(flag: Flag) -> None:
    names = {f"--{flag.name}", f"--{flag.dest}"}
    assert not names & set(THEIRS._option_string_actions)
    assert names <= set(OURS._option_string_actions)
    for prefix in {name[:length] for name in names for length in range(2, len(name))} - names:
        for argv in ([prefix, "1", "train.py"], [f"{prefix}=1", "train.py"]):
            assert parsed(OURS, argv) == parsed(THEIRS, argv), argv


WORDS = st.sampled_from(
    ["1", "2:4", "0", "x", "a=1,b=2", "0:3,1:2", "fork", "c10d", "-m", "--", ""]
)
SPELLINGS = sorted(THEIRS._option_string_actions)
ABBREVIATED = st.builds(lambda name, cut: name[: max(3, len(name) - cut)],
                        st.sampled_from(SPELLINGS), st.integers(0, 4))  # fmt: skip
ITEMS = st.one_of(
    st.sampled_from(SPELLINGS), ABBREVIATED, WORDS, st.builds("{}={}".format, ABBREVIATED, WORDS)
)
NUMBERS = st.sampled_from(["0", "1", "2"])
PET = st.dictionaries(st.sampled_from(sorted(DESTS)), NUMBERS, max_size=4)


@needs_torchrun_2_13
@settings(max_examples=300)
@given(st.lists(ITEMS, max_size=8), st.booleans(), PET)
def test_any_command_line_parses_as_torchrun_parses_it(
    items: list[str], script: bool, pet: dict[str, str]
) -> None:
    environ = {f"PET_{dest.upper()}": value for dest, value in pet.items()}
    argv = [*items, "train.py", "--x", "1"] if script else items
    assert parsed(make_parser(environ), argv) == parsed(torchrun_parser(environ), argv)


@needs_torchrun_2_13
@pytest.mark.parametrize(
    "line",
    [
        "--standalone --rdzv-id job",
        "--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint host:1234 --rdzv-id job",
        "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1",
        "--nnodes 2 --master-addr 10.0.0.1 --master-port 1",
        "--master-port 29501",
        "--nproc-per-node 4 --max-restarts 3 --role trainer --monitor-interval 5",
        "-r 3 -t 0:1,1:2 --local-ranks-filter 0,2",
        "--duplicate-stdout-filters a,,b,c --duplicate-stderr-filters x",
        "--signals-to-handle SIGTERM,SIGUSR1 --virtual-local-rank --local-addr 10.1.1.1",
        "--start-method fork --event-log-handler console --shutdown-timeout 7",
    ],
)
def test_options_say_what_torchruns_config_says(line: str) -> None:
    ours = options(line)
    with (
        mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}, clear=True),
        mock.patch.object(torchrun, "elastic_launch") as launch,
    ):
        torchrun.main([*line.split(), "train.py"])
    theirs = launch.call_args.kwargs["config"]
    for name in [
        "min_nodes",
        "max_nodes",
        "role",
        "max_restarts",
        "local_addr",
        "rdzv_backend",
        "virtual_local_rank",
        "log_line_prefix_template",
    ]:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert int(ours.nproc_per_node) == theirs.nproc_per_node
    assert ours.shutdown_timeout == (theirs.shutdown_timeout or 30)
    host, port = parse_rendezvous_endpoint(theirs.rdzv_endpoint, 29400)
    alone = (host, port) == ("localhost", 0)  # and the id is a uuid
    assert (ours.endpoint_host, ours.endpoint_port) == ("127.0.0.1" if alone else host, port)
    assert len(ours.run_id) == len(theirs.run_id) if alone else ours.run_id == theirs.run_id
    assert ",".join(ours.signals_to_handle) == theirs.signals_to_handle
    assert list(ours.duplicate_stdout_filters) == theirs.duplicate_stdout_filters
    assert list(ours.duplicate_stderr_filters) == theirs.duplicate_stderr_filters
    logs = theirs.logs_specs
    assert logs is not None
    assert ours.redirects == logs._redirects
    assert ours.tee == logs._tee
    assert ours.local_ranks_filter == logs._local_ranks_filter


def test_the_environment_gives_defaults_and_the_command_line_wins() -> None:
    environ = {
        "PET_NNODES": "3",
        "PET_MAX_RESTARTS": "2",
        "PET_NO_PYTHON": "1",
        "PET_RUN_PATH": "0",
    }
    found = options("--nnodes 2", environ)
    assert (found.max_nodes, found.max_restarts, found.entry_kind) == (2, 2, "program")
    assert found.without_effect == ()


def test_two_flags_have_no_variable() -> None:
    found = options("", {"PET_NUMA_BINDING": "node", "PET_LOGS_SPECS": "x"})
    assert found.numa_binding is None
    assert options("--numa-binding core-complex").numa_binding == "core-complex"


# Where the nodes meet.


def place(line: str, environ: Mapping[str, str] | None = None) -> tuple[str, int, bool | None]:
    found = options(line, environ)
    return found.endpoint_host, found.endpoint_port, found.hosts_master


@pytest.mark.parametrize(
    "line",
    ["", "--nnodes 1", "--standalone", "--standalone --rdzv-backend etcd --rdzv-endpoint h:1"],
)
def test_one_node_needs_no_endpoint(line: str) -> None:
    found = options(line)
    assert place(line) == ("127.0.0.1", 0, True)
    assert found.rdzv_backend == "c10d"
    assert len(found.run_id) == 36
    assert found.run_id != options(line).run_id


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--nnodes 2", ("127.0.0.1", 29500, True)),
        ("--nnodes 2 --node-rank 1 --master-addr h", ("h", 29500, False)),
        ("--master-port 5", ("127.0.0.1", 5, True)),
        ("--nnodes 2 --master-addr [::1] --master-port 5", ("::1", 5, True)),
        ("--nnodes 2 --master-addr ::1", ("::1", 29500, True)),
        ("--nnodes 2 --rdzv-endpoint h:7 --node-rank 1", ("h", 7, False)),
        ("--nnodes 2 --rdzv-endpoint h --master-port 7", ("h", 7, True)),
        ("--rdzv-backend c10d", ("localhost", 29400, None)),
        ("--rdzv-backend c10d --rdzv-endpoint h", ("h", 29400, None)),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0", ("localhost", 0, None)),
        ("--rdzv-backend c10d --rdzv-endpoint [::1]:29400", ("::1", 29400, None)),
        ("--rdzv-backend c10d --rdzv-endpoint [fe80::1]", ("fe80::1", 29400, None)),
        ("--rdzv-backend c10d --rdzv-endpoint h --rdzv-conf is_host=1", ("h", 29400, True)),
        ("--rdzv-backend c10d --rdzv-endpoint h --rdzv-conf is_host=No", ("h", 29400, False)),
    ],
)
def test_endpoint(line: str, expected: tuple[str, int, bool | None]) -> None:
    assert place(line) == expected


def test_the_place_asked_for_is_kept_where_it_can_be_had() -> None:
    c10d = "--nnodes 4 --rdzv-backend c10d --rdzv-endpoint h"
    assert options("--nnodes 4 --node-rank 2 --master-addr h").node_rank == 2
    assert options(f"{c10d} --node-rank 2").node_rank == 2
    assert options(c10d).node_rank is None
    assert options(f"{c10d} --node-rank 9").node_rank is None
    assert options(f"{c10d} --node-rank 9").without_effect == ("--node-rank",)


def test_several_nodes_without_an_id_share_torchruns() -> None:
    assert options("--nnodes 2 --master-addr h").run_id == "none"


def test_the_last_call_is_short() -> None:
    """torchrun's is 30 s."""
    assert options("--nnodes 1:2 --rdzv-backend c10d").last_call == 1


def test_a_node_that_joins_has_time_to_import() -> None:
    assert options("--nnodes 1:2 --rdzv-backend c10d").preparation == 15
    assert options("--nnodes 1:2 --rdzv-backend c10d --preparation 60").preparation == 60


def test_rdzv_conf() -> None:
    found = options(
        "--rdzv-backend c10d --join-timeout 5 --last-call 6 --rdzv-conf "
        "join_timeout=20,last_call_timeout=3,timeout=5,close_timeout=9,store_type=tcp,mine=x"
    )
    assert (found.join_timeout, found.last_call) == (20, 3)
    assert found.without_effect == tuple(
        f"--rdzv-conf {key}" for key in ("timeout", "close_timeout", "store_type", "mine")
    )
    assert options("--join-timeout 5 --last-call 6").last_call == 6
    assert options("--rdzv-conf lastcall_timeout=60").last_call == 60  # DLRover's spelling
    static = options("--nnodes 2 --rdzv-conf is_host=1,rank=3")
    assert static.without_effect == ("--rdzv-conf is_host", "--rdzv-conf rank")


POD = {
    "ELASTIC_POD_JOB": "job", "ELASTIC_POD_NAME": "job-worker-1-r0", "ELASTIC_POD_MASTER": "job-master:29400",
    "ELASTIC_POD_NODES": "1:2",
}  # fmt: skip


def test_what_an_elasticjob_has_fields_for_is_said() -> None:
    line = "--hang-action dump --node_unit 2 --max-restarts 3 --rank-unit 2"
    assert options(line, POD).without_effect == ("--node-unit", "--hang-action")
    found = options("--rank-unit 2", POD)
    assert found.without_effect == ()
    assert found.exit_codes == "detailed"
    assert options("--exit-codes torchrun", POD).exit_codes == "detailed"
    assert options("").exit_codes == "torchrun"


def test_in_a_pod_the_specs_range_decides_over_the_command_lines() -> None:
    line = "in a pod of ElasticJob job its spec's range, 1:2 nodes, decides; "
    for asked in ("--nnodes 7", "--standalone"):
        found = options(asked, POD)
        assert (found.min_nodes, found.max_nodes) == (1, 2)
        assert found.overruled == f"{line}{asked} does not"
    assert options("", POD).overruled == ""


def test_what_is_overridden_is_said() -> None:
    assert options("--standalone --rdzv-endpoint h:1").without_effect == ("--rdzv-endpoint",)
    assert options("--rdzv-id mine").without_effect == ("--rdzv-id",)
    line = "--rdzv-backend c10d --rdzv-endpoint h --master-addr h"
    assert options(line).without_effect == ("--master-addr",)


# Flags of our own.


@pytest.mark.parametrize(
    ("line", "environ", "field", "expected"),
    [
        ("--node-unit 2 --nnodes 1:4", {}, "node_unit", 2),
        ("--node_unit 2 --nnodes 1:4", {}, "node_unit", 2),
        ("--nnodes 1:4", {"ELASTIC_NODE_UNIT": "4"}, "node_unit", 4),
        ("--node-unit 2 --nnodes 1:4", {"ELASTIC_NODE_UNIT": "4"}, "node_unit", 2),
        ("--rank-unit 8", {}, "rank_unit", 8),
        ("--rank-start spawn", {}, "rank_start", "spawn"),
        ("--rank-start fork", {}, "rank_start", "fork"),
        ("--spare-ranks off", {}, "spare_ranks", "off"),
        ("--failure-grace 1.5", {}, "failure_grace", 1.5),
        ("--hang-floor 30", {}, "hang_floor", 30.0),
        ("--hang-action dump", {}, "hang_action", "dump"),
        ("--straggler-interval 60", {}, "straggler_interval", 60.0),
        ("--exclude-straggler", {}, "exclude_straggler", True),
        ("", {"PET_EXCLUDE_STRAGGLER": "1"}, "exclude_straggler", True),
        ("", {}, "drain_timeout", 60),
        ("", {"ELASTIC_DRAIN_TIMEOUT": "5"}, "drain_timeout", 5),
        ("--port-range 29500-29600", {}, "port_range", (29500, 29600)),
        ("", {"ELASTIC_PORT_RANGE": "1-4"}, "port_range", (1, 4)),
        ("--state-dir /s", {}, "state_dir", "/s"),
        ("--token-file /t --require-token", {}, "require_token", True),
        ("--token-file /t", {"ELASTIC_REQUIRE_TOKEN": "1"}, "require_token", True),
        ("--tls-cert c --tls-key k --tls-ca a", {}, "tls_ca", "a"),
        ("--report r.json", {}, "report", "r.json"),
        ("", {}, "below_min_timeout", None),
        ("--below-min-timeout 60", {}, "below_min_timeout", 60),
        ("--lease 2", {}, "lease", 2),
        ("--fault-budget 0", {}, "fault_budget", 0),
        ("--node-id n1", {}, "node_id", "n1"),
        ("--label rack=1 --label zone=a", {}, "labels", {"rack": "1", "zone": "a"}),
        ("", {"ELASTIC_LABEL": "rack=1,zone=a"}, "labels", {"rack": "1", "zone": "a"}),
        ("--label a=1 --label b=2", {"ELASTIC_LABEL": "c=3"}, "labels", {"a": "1", "b": "2"}),
        ("", {}, "notify", ()),
        ("--notify HTTP://h:1/x --notify ./tell", {}, "notify", ("HTTP://h:1/x", "./tell")),
        ("", {"ELASTIC_NOTIFY": "mail -s job me"}, "notify", ("mail -s job me",)),
        ("--log-keep 3", {}, "log_keep", 3),
        ("", {}, "log_limit", 1 << 30),
        ("--log-limit 1.5M", {}, "log_limit", 3 << 19),
        ("--log-limit 2GiB", {}, "log_limit", 2 << 30),
        ("--log-limit 0", {}, "log_limit", 0),
    ],
)
def test_our_flag(line: str, environ: dict[str, str], field: str, expected: object) -> None:
    assert getattr(options(line, environ), field) == expected


def test_flags_after_the_script_are_the_scripts() -> None:
    found = options("", {})
    assert found.entry_args == ()
    argv = ["--label", "a=1", "train.py", "--label", "b", "--nnodes=2", "--", "-m"]
    found = parse(argv, {})
    assert found.entry_args == ("--label", "b", "--nnodes=2", "--", "-m")
    assert found.labels == {"a": "1"}


# What runs.


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("", "script"),
        ("-m", "module"),
        ("--no-python", "program"),
        ("--run-path", "run_path"),
        ("--run-path --no-python -m", "run_path"),
    ],
)
def test_entry(line: str, kind: str) -> None:
    found = parse([*line.split(), "train.py", "--lr", "1"], {})
    assert (found.entry_kind, found.entry, found.entry_args) == (kind, "train.py", ("--lr", "1"))


def test_python_and_settings_that_have_only_a_variable() -> None:
    assert options("").python == sys.executable
    environ = {
        "PYTHON_EXEC": "/p",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4.5",
    }
    found = options("", environ)
    assert (found.python, found.log_line_prefix_template) == ("/p", "${rank}")
    assert found.shutdown_timeout == 4.5
    assert options("--shutdown-timeout 0", environ).shutdown_timeout == 0


# Streams.


@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:3", "0:3,1:2", "3:0,1:1"])
def test_streams_as_torchrun_reads_them(text: str) -> None:
    spec, theirs = values.std(text, "-r"), Std.from_str(text)
    assert spec == theirs
    for rank in range(4):
        theirs_for_rank = theirs if isinstance(theirs, Std) else theirs.get(rank, Std.NONE)
        assert of_rank(spec, rank) == theirs_for_rank


def test_streams_of_the_eleventh_rank() -> None:
    assert of_rank(options("--tee 0:3,10:1").tee, 10) == 1
    assert of_rank(options("--tee 0:3,10:1").tee, 9) == 0


@pytest.mark.parametrize("text", ["4", "", "1:4", "x", "0:1,", "0:1;1:2", "-1:2", "0:1 ,1:2"])
def test_streams_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--tee"):
        values.std(text, "--tee")
    with pytest.raises(ValueError, match="does not match"):
        Std.from_str(text)


# dlrover-run's flags.


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("--network-check", {}, ()),
        ("", {"PET_COMM_PERF_TEST": "1"}, ("--comm-perf-test",)),
        ("--exclude_straggler --comm-perf-test", {}, ("--comm-perf-test",)),
        ("--precheck 0", {}, ()),
        ("--precheck 2", {}, ()),
        ("--save_at_breakpoint", {}, ("--save-at-breakpoint",)),
        ("--accelerator nvidia.com/gpu", {}, ()),
        ("", {"PET_AUTO_TUNNING": "0"}, ()),
    ],
)
def test_dlrover_flags_without_effect(
    line: str, environ: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert options(line, environ).without_effect == expected


@pytest.mark.parametrize(
    ("line", "environ", "hint"),
    [
        ("--auto-tunning", {}, "leave it out"),
        ("--auto_tunning", {}, "leave it out"),
        ("--training_port 60000", {}, "--port-range"),
        ("", {"PET_TRAINING_PORT": "60000"}, "--port-range"),
        ("--membind-policy bind", {}, "--numa-binding"),
        ("--ucp_device_type cpu", {}, "leave it out"),
        ("--accelerator ascend-npu", {}, "--nproc-per-node"),
        ("", {"ELASTIC_PRECHECK": "7"}, "off or quick or full"),
    ],
)
def test_dlrover_flags_that_are_refused(line: str, environ: dict[str, str], hint: str) -> None:
    assert hint in refusal(line, environ)


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("", {}, "off"),
        ("--nnodes 2", {}, "quick"),
        ("--nnodes 1:2", {}, "quick"),
        ("--nnodes 2 --precheck 0", {}, "off"),
        ("--standalone", {}, "off"),
        ("--nnodes 2 --probe-only", {}, "quick"),
        ("--precheck full", {}, "full"),
        ("--precheck 1", {}, "quick"),
        ("", {"ELASTIC_PRECHECK": "2"}, "full"),
        ("", {"PET_PRECHECK": "1"}, "quick"),
        ("--precheck off", {"PET_PRECHECK": "1"}, "off"),
        ("--network-check", {}, "quick"),
        ("", {"PET_NETWORK_CHECK": "1"}, "quick"),
        ("--network-check --precheck 2", {}, "full"),
    ],
)
def test_how_nodes_are_probed(line: str, environ: dict[str, str], expected: str) -> None:
    assert options(line, environ).precheck == expected


def test_dlrovers_auto_config_and_numa_affinity() -> None:
    found = options("--auto-config --numa-affinity", {"NODE_NUM": "3"})
    assert (found.min_nodes, found.max_nodes, found.nproc_per_node) == (3, 3, "auto")
    assert found.numa_binding == "node"
    found = options("--auto_config --nnodes 1:2 --nproc-per-node 4", {"NODE_NUM": "3"})
    assert (found.min_nodes, found.max_nodes, found.nproc_per_node) == (1, 2, "4")
    assert options("--numa-affinity --numa-binding socket").numa_binding == "socket"
    assert options("--auto-config").max_nodes == 1


# Mistakes.


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--nnodes 0", "at least 1 node"),
        ("--nnodes 3:2", "is above"),
        ("--nnodes 1:2:3", "MIN:MAX"),
        ("--nnodes two", "MIN:MAX"),
        ("--nnodes=-1", "at least 1 node"),
        ("--nproc-per-node 0", "from 1 up"),
        ("--nproc-per-node=-2", "from 1 up"),
        ("--nproc-per-node 2.5", "from 1 up"),
        ("--max-restarts=-1", "at least 0"),
        ("--max-restarts x", "invalid int value"),
        ("-m --no-python", "exclude each other"),
        ("-r 5", "--redirects"),
        ("-t 0:9", "--tee"),
        ("--local-ranks-filter a", "such as 0,1,2"),
        ("--rdzv-conf join_timeout", "needs a value"),
        ("--rdzv-conf join_timeout=", "needs a value"),
        ("--rdzv-conf =5", "KEY=VALUE"),
        ("--rdzv-conf join_timeout=soon", "number of seconds"),
        ("--rdzv-conf join_timeout=0", "more than 0"),
        ("--rdzv-backend c10d --rdzv-conf is_host=maybe", "true or false"),
        ("--rdzv-backend etcd", "use --rdzv-backend c10d: the master takes etcd's part"),
        ("--rdzv-backend etcd-v2", "use --rdzv-backend c10d: the master takes etcd's part"),
        ("--rdzv-backend zeus", "static or c10d"),
        ("--rdzv-backend c10d --rdzv-endpoint h:x", "port must be a number"),
        ("--rdzv-backend c10d --rdzv-endpoint h:65536", "port must be a number"),
        ("--rdzv-backend c10d --rdzv-endpoint ::1", "in brackets"),
        ("--rdzv-backend c10d --rdzv-endpoint /tmp/store", "HOST:PORT"),
        ("--rdzv-backend c10d --rdzv-endpoint 10.0.0.300", "neither a name nor an address"),
        ("--rdzv-backend c10d --rdzv-endpoint a..b:1", "neither a name nor an address"),
        (f"--nnodes 2 --master-addr {'a' * 64}", "neither a name nor an address"),
        ("--nnodes 2 --master-addr node%1", "neither a name nor an address"),
        ("--rdzv-backend c10d --nnodes 2 --rdzv-endpoint h:0", "port 0"),
        ("--rdzv-backend c10d --rdzv-id=", "--rdzv-id is empty"),
        ("--nnodes 2 --node-rank 2", "from 0 to 1"),
        ("--nnodes 2 --master-port 70000", "0 to 65535"),
        ("--standalone --nnodes 2", "runs on one node"),
        ("--signals-to-handle SIGNONE", "there is no signal"),
        ("--signals-to-handle SIGKILL", "leave it out"),
        ("--shutdown-timeout=-1", "at least 0"),
        ("--nnodes 5:7 --node-unit 4", "no multiple"),
        ("--node-unit 0", "at least 1"),
        ("--rank-unit 0", "at least 1"),
        ("--rank-start exec", "invalid choice"),
        ("--failure-grace=-1", "number of seconds"),
        ("--hang-floor 0", "at least 0.1"),
        ("--hang-action stop", "invalid choice"),
        ("--straggler-interval 0", "at least 0.5"),
        ("--drain-timeout inf", "number of seconds"),
        ("--lease 0", "more than 0"),
        ("--fault-budget=-1", "at least 0"),
        ("--log-keep 0", "at least 1"),
        ("--log-limit much", "512M"),
        ("--port-range 5", "LO-HI"),
        ("--port-range 9-5", "LO-HI"),
        ("--port-range 0-5", "LO-HI"),
        ("--port-range 1-65536", "LO-HI"),
        ("--label rack", "KEY=VALUE"),
        ("--label rack=1 --label rack=2", "write one"),
        ("--tls-cert c --tls-key k", "all or none"),
        ("--notify=", "it is empty"),
        ("--notify http://", "is no URL"),
        ("--notify http://h:port/", "is no URL"),
        ("--notify ftp://h/x", "http or https"),
        ("--logs-specs mine", "--log-dir"),
        ("--no-such-flag", "unrecognized arguments"),
    ],
)
def test_a_mistake_is_one_line(line: str, hint: str) -> None:
    assert hint in refusal(line)


@pytest.mark.parametrize("scheme", ["https", "ftp"])
def test_a_mistake_in_a_url_does_not_show_its_secrets(scheme: str) -> None:
    assert "SECRET" not in refusal(f"--notify {scheme}://me:SECRET@host:port/SECRET")


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        ({"PET_STANDALONE": "yes"}, "PET_STANDALONE='yes'"),
        ({"ELASTIC_REQUIRE_TOKEN": ""}, "write 0 or 1"),
        ({"PET_MAX_RESTARTS": "x"}, "invalid int value"),
        ({"ELASTIC_LEASE": "x"}, "number of seconds"),
        ({"ELASTIC_RANK_START": "exec"}, "auto or fork or spawn"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, "number of seconds"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "nan"}, "number of seconds"),
    ],
)
def test_a_mistake_in_the_environment_is_one_line(environ: dict[str, str], hint: str) -> None:
    assert hint in refusal("", environ)


def test_options_made_otherwise_are_checked_too() -> None:
    with pytest.raises(UsageError, match="--max-restarts"):
        replace(options(""), max_restarts=-1)


def test_help_shows_every_flag_in_one_spelling() -> None:
    code, text = outcome(lambda: parse(["--help"], {}))
    assert code == 0
    for flag in (*flags.TORCHRUN, *flags.OURS, *dlrover_flags.FLAGS):
        assert f"--{flag.name}" in str(text)
        assert flag.dest == flag.name or f"--{flag.dest}" not in str(text)


# Other Pythons, and a quick start.

_SAME_ABBREVIATIONS = """
import argparse, contextlib, io
from elastic.flags import TORCHRUN
from elastic.agent.logs.logs import of_rank
from elastic.options import make_parser
from elastic.parser import Parser

def outcome(parser, argv):
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        try:
            return {k: v for k, v in vars(parser.parse(argv)).items() if k in dests}
        except SystemExit as error:
            return error.code, text.getvalue().rpartition("error: ")[2] if error.code else ""

alone = Parser(prog="torchrun")
alone.add_flags("", TORCHRUN, {}, "PET_", description="", abbreviate=True)
alone.add_argument("training_script")
alone.add_argument("training_script_args", nargs=argparse.REMAINDER)
dests = {action.dest for action in alone._actions}
names = {name for action in make_parser({})._actions for name in action.option_strings}
prefixes = {name[:n] for name in names for n in range(1, len(name) + 1)}
ours = make_parser({})
for prefix in prefixes - (names - set(alone._option_string_actions)):
    for argv in ([prefix, "1", "train.py"], [prefix + "=1", "train.py"]):
        assert outcome(ours, argv) == outcome(alone, argv), argv
assert make_parser({}).parse(["--node_unit", "2", "--max-r=3", "t.py", "--x"]).max_restarts == 3
"""


@pytest.mark.parametrize(
    ("command", "version"), [("python3.12", "3.12.1"), ("python3.13", "3.13.0")]
)
def test_abbreviations_on_other_pythons(command: str, version: str) -> None:
    environ = {**os.environ, "PYENV_VERSION": version, "PYTHONPATH": str(ROOT)}
    probe = [command, "-c", "pass"]
    if not shutil.which(command) or subprocess.run(probe, env=environ, check=False).returncode:
        pytest.skip(f"no {command} here")
    subprocess.run([command, "-c", _SAME_ABBREVIATIONS], env=environ, check=True)


def test_import_is_light() -> None:
    code = "import sys, elastic.options; print(*sys.modules)"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    loaded = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True).split()
    assert not {"torch", "grpc", "google.protobuf", "asyncio", "numpy", "pynvml"} & set(loaded)
