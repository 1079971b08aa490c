"""What elastic-run makes of Slurm's variables."""

import pytest

from elastic import slurm
from elastic.options import parse
from elastic.proto.errors import UsageError

# As srun sets them on the second of two nodes.
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[07-10]",
}


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("a", "a"),
        ("a,b1", "a b1"),
        ("a[001-003,7],b1", "a001 a002 a003 a7 b1"),
        ("a[08-11]", "a08 a09 a10 a11"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("r[1-2]n[3,5]-ib,x", "r1n3-ib r1n5-ib r2n3-ib r2n5-ib x"),
        ("a[1-2].site.org", "a1.site.org a2.site.org"),
        ("", ""),
    ],
)
def test_host_list(hostlist: str, hosts: str) -> None:
    assert slurm.expand(hostlist) == hosts.split()


@pytest.mark.parametrize("hostlist", ["a[1", "a[1-]", "a[x]", "a]", "a[[1]]", "a b", "a,", "[1,]"])
def test_host_list_that_cannot_be_read(hostlist: str) -> None:
    with pytest.raises(UsageError, match="cannot read Slurm's list"):
        slurm.expand(hostlist)


def test_srun_says_everything() -> None:
    found = parse(["--nproc-per-node", "4", "train.py"], SRUN)
    assert (found.min_nodes, found.max_nodes, found.nproc_per_node) == (2, 2, "4")
    assert (found.endpoint_host, found.endpoint_port) == ("gpu07", 22000 + 4711)
    assert (found.run_id, found.node_rank, found.hosts_master) == ("slurm-4711", 1, False)
    assert found.drain_signals == ("SIGUSR1", "SIGUSR2")


def test_the_first_node_hosts_the_master() -> None:
    found = parse(["train.py"], {**SRUN, "SLURM_NODEID": "0", "SLURM_PROCID": "0"})
    assert (found.node_rank, found.hosts_master) == (0, True)


def test_a_later_step_and_a_requeued_job() -> None:
    found = parse(["train.py"], {**SRUN, "SLURM_STEP_ID": "3", "SLURM_RESTART_COUNT": "1"})
    assert found.run_id == "slurm-4711.3"
    assert found.endpoint_port != 22000 + 4711


def test_the_jobs_variables_stand_in_for_the_steps() -> None:
    environ = {k: v for k, v in SRUN.items() if k not in ("SLURM_STEP_NUM_NODES",)}
    del environ["SLURM_STEP_NODELIST"]
    found = parse(["train.py"], environ)
    assert (found.max_nodes, found.endpoint_host) == (4, "gpu07")


def test_the_port_lies_in_the_range_that_is_asked_for() -> None:
    for job in ("1", "4711", "123456789"):
        port = parse(["train.py"], {**SRUN, "SLURM_JOB_ID": job}).endpoint_port
        assert slurm.PORTS[0] <= port <= slurm.PORTS[1]
    assert 5 <= parse(["--port-range", "5-8", "train.py"], SRUN).endpoint_port <= 8
    assert parse(["--master-port", "7", "train.py"], SRUN).endpoint_port == 7


def test_what_the_user_says_goes_before() -> None:
    found = parse(["--rdzv-id", "mine", "--rdzv-backend", "c10d", "train.py"], SRUN)
    assert (found.run_id, found.rdzv_backend, found.max_nodes) == ("mine", "c10d", 2)
    signals = ["--signals-to-handle", "SIGTERM,SIGUSR1", "train.py"]
    assert parse(signals, SRUN).drain_signals == ("SIGUSR2",)


def test_how_many_nodes_are_enough_is_said_beside_slurm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = parse(["--nnodes", "1:2", "train.py"], SRUN)
    assert (found.min_nodes, found.max_nodes) == (1, 2)
    assert (found.endpoint_host, found.endpoint_port) == ("gpu07", 22000 + 4711)
    assert (found.run_id, found.node_rank, found.hosts_master) == ("slurm-4711", 1, False)
    with pytest.raises(SystemExit) as ended:
        parse(["--nnodes", "3:4", "train.py"], SRUN)
    assert ended.value.code == 2
    assert "--nnodes 3:4: this step of Slurm's has 2 nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["--nnodes 1", "--standalone", "--nnodes 2 --rdzv-endpoint h:1 --rdzv-backend c10d"]
)
def test_who_says_where_does_not_ask_slurm(line: str) -> None:
    environ = {**SRUN, "SLURM_STEP_NODELIST": "]"}
    found = parse([*line.split(), "train.py"], environ)
    assert found.endpoint_host in ("127.0.0.1", "h")
    assert not found.run_id.startswith("slurm")
    assert found.drain_signals == ("SIGUSR1", "SIGUSR2")


def test_a_step_of_one_node() -> None:
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    found = parse(["train.py"], {**SRUN, **one})
    assert (found.max_nodes, found.endpoint_host, found.endpoint_port) == (1, "127.0.0.1", 0)
    assert (found.run_id, found.hosts_master) == ("slurm-4711", True)
    assert parse(["train.py"], {**SRUN, **one}) == found


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": str(2**32 - 5)},  # the batch script
        {"SLURM_STEP_ID": ""},
        {"SLURM_JOB_ID": ""},
    ],
)
def test_outside_a_step_slurm_has_no_say(changed: dict[str, str]) -> None:
    found = parse(["train.py"], {**SRUN, **changed, "SLURM_RESTART_COUNT": "1"})
    assert (found.max_nodes, found.endpoint_host) == (1, "127.0.0.1")
    assert found.drain_signals == ()


@pytest.mark.parametrize(
    ("changed", "hint"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "--ntasks-per-node=1"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "--rdzv-endpoint"),
        ({"SLURM_STEP_NUM_NODES": "two"}, "is no number"),
        ({"SLURM_NODEID": ""}, "SLURM_NODEID"),
        ({"SLURM_NODEID": "2"}, "from 0 to 1"),
    ],
)
def test_a_step_that_makes_no_sense(
    changed: dict[str, str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(["train.py"], {**SRUN, **changed})
    assert exit_.value.code == 2
    assert hint in capsys.readouterr().err
