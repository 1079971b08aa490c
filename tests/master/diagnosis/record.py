"""`python -m tests.master.diagnosis.record FOLDER [WORD] [--cuda]`: run jobs that fail, and keep how.

Every plan of plans.py (those with WORD in their id) is run with the agent's own parts, a few nodes
in this one process: real starters, real ranks, real stores, and `Ranks.failure` for what the master
hears. Needs Linux, root, a C compiler and version 1 of the memory cgroup; it runs in namespaces of
its own. Writes FOLDER/ID.json for each. --cuda: what needs two GPUs, and nothing but these.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from elastic.agent import file_timer, prctl
from elastic.agent.ports import listen
from elastic.agent.ranks import Rank, Ranks
from elastic.agent.settings import AgentSettings, LogSettings, Workload
from elastic.agent.starters.spares import Spares
from elastic.agent.starters.spec import StartSpec
from elastic.agent.starters.starter import Starter, StartFailed
from elastic.agent.starters.starters import Starters
from elastic.master import messages
from elastic.proto import link
from elastic.proto import master_pb2 as pb
from elastic.proto.security import Security
from tests.e2e.harness.stuck import stuck_folder
from tests.master.diagnosis import native
from tests.master.diagnosis.machine import Kernel, limited
from tests.master.diagnosis.networks import Networks
from tests.master.diagnosis.plans import DEVICE_PLANS, DISK_PLANS, PLANS, Plan

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[3]
MOST, MOST_CUDA = 45.0, 150.0
"""Seconds until it is heard; torch's watchdog of NCCL waits for others' records before it ends a process."""


def environment() -> dict[str, str]:
    """Ours, without what tells where we run."""
    torch = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_CPP_")
    drop = ("PYTEST_", "ELASTIC_", "PYTHON", "OMP_", "VIRTUAL_ENV", *torch)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return kept | ours | {"PYTHONPATH": path}


def settings(name: str, slots: int, folder: Path, plan: Plan) -> AgentSettings:
    entry, kind = plan.entry, plan.kind
    args: tuple[str, ...] = ()
    if plan.fault:
        on = 0 if plan.on is None else plan.on
        numbers = {"on": on, "step": plan.step, "linger": plan.linger, "timeout": plan.timeout}
        numbers["variant"] = plan.variant
        args = (plan.fault, *(f"--{key}={value}" for key, value in numbers.items()), *plan.flags)
    timers = folder / "timers" if plan.timers and name == "node-0" else None
    if plan.timers and len(plan.nodes) > 1:
        timers = folder / "timers" if name == f"node-{len(plan.nodes) - 1}" else None
    gone = plan.cwd_gone and name == "node-0"
    return AgentSettings(
        run_id="pretrain",
        node_id=name,
        slots=slots,
        master="",
        host="127.0.0.1",
        workload=Workload(
            kind=kind,  # type: ignore[arg-type]
            entry=entry,
            args=args,
            python=sys.executable,
            environ=environment() | dict(plan.environ),
            cwd=str(folder / ("gone" if gone else "job")),
        ),
        logs=LogSettings(run_dir=folder / "logs" / name, redirects=3),
        security=Security(),
        timer_pipe=str(timers) if timers else None,
        rank_start="auto" if not plan.spawn and kind == "script" else "spawn",
    )


class Pool:
    """Starters that are kept from case to case, so that torch is imported once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._forking: dict[str, Starters] = {}
        self._spawning: dict[str, Starters] = {}
        self.nursery: Starter | None = None

    async def starters(self, given: AgentSettings) -> Starters:
        """A set for this node, with a standby where ranks are forked."""
        kept = self._forking if given.rank_start == "auto" else self._spawning
        if given.node_id not in kept:
            cwd = dataclasses.replace(given.workload, cwd=str(self._folder), kind="script")
            starters = Starters(dataclasses.replace(given, workload=cwd, timer_pipe=None))
            starters.prepare()
            kept[given.node_id] = starters
            if given.rank_start == "auto":
                await starters.standby_ready.wait()
        return kept[given.node_id]

    async def store(self, host: str) -> tuple[int, str]:
        """Pid and address of a new store."""
        if self.nursery is None:
            self.nursery = await Starter.launch(
                "nursery", environ=environment(), cwd=str(self._folder), python=sys.executable
            )
            await self.nursery.ready()
        listener = listen(host)
        spec = StartSpec(
            kind="store", target=host, environ=environment(), cwd="/", python=sys.executable
        )
        pid = await self.nursery.start(spec, {"listen": listener.fileno()})
        with listener:
            return pid, f"{host}:{listener.getsockname()[1]}"

    def close(self) -> None:
        for starters in (*self._forking.values(), *self._spawning.values()):
            starters.kill()
        if self.nursery is not None:
            self.nursery.kill()


class Case:
    """One run of one plan."""

    def __init__(self, plan: Plan, folder: Path, pool: Pool) -> None:
        self._plan = plan
        self._folder = folder
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._began = 0.0
        self._heard: list[dict[str, Any]] = []
        self._first = asyncio.Event()
        self._nodes: dict[str, Ranks] = {}
        self._left = sum(plan.nodes)
        self._over = asyncio.Event()
        self._kernel = Kernel()
        self._timers: file_timer.Server | None = None
        self._disks: list[Path] = []
        self._mounted = contextlib.ExitStack()
        self._networks = Networks(len(plan.nodes)) if plan.cut else None

    @property
    def _culprit(self) -> str:
        """The node that holds the failing rank."""
        on, first = self._plan.on or 0, 0
        for number, size in enumerate(self._plan.nodes):
            if first <= on < first + size:
                return f"node-{number}"
            first += size
        raise ValueError(f"{self._plan.id}: there is no rank {on}")

    async def run(self) -> dict[str, Any]:
        plan = self._plan
        self._prepare()
        host = self._networks.address if self._networks else "127.0.0.1"
        store, address = await self._pool.store(host)
        self._began = self._loop.time()
        try:
            starting = [self._start(n, size, address) for n, size in enumerate(plan.nodes)]
            await asyncio.gather(*starting)
            acting = asyncio.create_task(self._act(store))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MOST_CUDA if plan.cuda else MOST):
                    await self._first.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(plan.after):
                    await self._over.wait()
                    await asyncio.sleep(max(0.0, plan.late) + 0.1)
            acting.cancel()
        finally:
            pids = {rank.pid for ranks in self._nodes.values() for rank in ranks.ranks}
            for ranks in self._nodes.values():
                await ranks.stop(0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(store, signal.SIGKILL)
            self._clean_up()
        return self._result(self._kernel.lines(pids))

    def _clean_up(self) -> None:
        if self._networks:
            self._networks.close()
        if self._timers is not None:
            self._timers.close()
        self._mounted.close()
        for disk in self._disks:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)

    def _prepare(self) -> None:
        shutil.copytree(SCRIPTS, self._folder / "job")
        if not self._plan.cuda:
            native.build(self._folder / "job")
        if self._plan.bad_disk:
            job = self._folder / "job"
            self._mounted.enter_context(stuck_folder(job / "disk", error=-errno.EIO))
            self._mount(job / "readonly", "ro")
        if self._plan.logs_full:
            for number in range(len(self._plan.nodes)):
                disk = self._folder / "logs" / f"node-{number}"
                self._mount(disk, "size=1m")

    def _mount(self, disk: Path, options: str) -> None:
        disk.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "small", str(disk)]
        subprocess.run(command, check=True)
        self._disks.append(disk)

    async def _start(self, number: int, size: int, store: str) -> None:
        name, plan = f"node-{number}", self._plan
        given = settings(name, size, self._folder, plan)
        if self._networks:
            inside = {"ELASTIC_TEST_NETWORK": self._networks.inside(number)}
            work = dataclasses.replace(
                given.workload,
                environ={**given.workload.environ, **inside, "GLOO_SOCKET_IFNAME": "eth0"},
            )
            given = dataclasses.replace(given, workload=work)
        starters = await self._pool.starters(given)
        order = pb.Directive(
            kind=pb.Directive.RUN,
            round=1,
            node_rank=number,
            num_nodes=len(plan.nodes),
            first_rank=sum(plan.nodes[:number]),
            local_world_size=size,
            world_size=sum(plan.nodes),
            store=store,
        )
        ranks = self._nodes[name] = Ranks(given, "5f0c", order, starters, Spares(given, starters))
        if given.timer_pipe:
            self._timers = file_timer.Server(given.timer_pipe, ranks.expire)

        def seen(rank: Rank) -> None:
            self._left -= 1
            if rank.exit_code:
                self._tell(name, ranks.failure(rank))
            if not self._left:
                self._over.set()

        try:
            await ranks.start(seen, _ignore)
        except (OSError, ValueError, StartFailed) as error:  # as the agent tells it
            self._left -= size
            start = pb.RankFailure.START
            failure = pb.RankFailure(
                rank=order.first_rank, exit_code=1, what=start, message=str(error)
            )
            self._tell(name, failure)

    def _tell(self, node: str, told: pb.RankFailure) -> None:
        plan = self._plan
        if plan.silent and node == self._culprit:
            return
        late = plan.late if node == self._culprit else 0.0
        self._loop.call_later(late, self._hear, node, told)

    def _hear(self, node: str, told: pb.RankFailure) -> None:
        failure = dataclasses.asdict(messages.failure(told))
        del failure["kernel_log"]  # a case has that of each host
        at = round(self._loop.time() - self._began, 3)
        self._heard.append({"node_id": node, "at": at} | failure)
        self._first.set()

    async def _act(self, store: int) -> None:
        """What is done to the job from outside."""
        plan = self._plan
        if plan.cut:
            await self._wait(sum(plan.nodes))
            assert self._networks is not None
            self._networks.cut()
        elif plan.kills_store:
            await self._wait(sum(plan.nodes))
            os.kill(store, signal.SIGKILL)
            lost = pb.RankFailure(what=pb.RankFailure.STORE, exit_code=1, message="the store died")
            self._tell("node-0", lost)
        elif plan.signal:
            await self._wait(1)
            for rank in self._nodes[self._culprit].ranks:
                if rank.number == plan.on or plan.to_all:
                    os.kill(rank.pid, plan.signal)

    async def _wait(self, count: int) -> None:
        """Until so many ranks said that they wait."""
        while len(list((self._folder / "job").glob("waiting-*"))) < count:
            await asyncio.sleep(0.02)

    def _result(self, kernel: list[str]) -> dict[str, Any]:
        plan = self._plan
        culprit: dict[str, Any] | None = {"node_id": self._culprit, "rank": plan.on}
        if plan.on is None:
            culprit = {"node_id": "node-0", "rank": None} if plan.kills_store else None
        if plan.label == "node_lost":
            culprit = {"node_id": self._culprit, "rank": None}
        said = [f"torch {version('torch')}, {_backend(plan)}, Python {platform.python_version()}"]
        said += [f"{len(plan.nodes)} nodes of {plan.nodes} ranks in one process"]
        if plan.late:
            said.append(f"what {self._culprit} tells comes {plan.late:g} s late")
        if plan.linger:
            said.append(f"the failing rank exits {plan.linger:g} s after its group is closed")
        if plan.silent:
            said.append(f"nothing comes from {self._culprit}")
        lines = [self._clean(line) for line in kernel]
        on_node = self._culprit if plan.on is not None else ""
        return {
            "id": plan.id,
            "label": plan.label,
            "culprit": culprit,
            "source": "recorded: " + "; ".join(said),
            "failures": json.loads(self._clean(json.dumps(self._heard))),
            "hosts": {
                f"node-{n}": {
                    "kernel_log": lines if f"node-{n}" == on_node and not plan.silent else [],
                    "container_exit": None,
                }
                for n in range(len(plan.nodes))
            },
        }

    def _clean(self, text: str) -> str:
        """Without the paths and names of the machine that it was recorded on."""
        for theirs, ours in (
            (str(self._folder / "job"), "/workspace"),
            (str(self._folder), "/scratch"),
            (str(Path(sys.prefix)), "/opt/venv"),
            (str(ROOT), "/opt/elastic"),
            (sys.base_prefix, "/usr"),
            (f"{platform.node()}]", "host]"),
        ):
            text = text.replace(theirs, ours)
        return re.sub(r"/process_api/[0-9a-f]+/elastic-record", "/job", text)


def _backend(plan: Plan) -> str:
    if not plan.cuda:
        return "Gloo"
    import torch

    found = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"CUDA {torch.version.cuda}, NCCL {found}, {torch.cuda.get_device_name()}"


def _ignore(rank: Rank, message: link.Message) -> None:
    """No message of a rank's matters here."""


async def record(plans: list[Plan], out: Path, work: Path) -> None:
    prctl.set_child_subreaper()
    pool = Pool(work)
    try:
        for plan in plans:
            result = await Case(plan, work / plan.id, pool).run()
            (out / f"{plan.id}.json").write_text(json.dumps(result, indent=1) + "\n")
            heard = [f"{f['node_id']}/{f['rank']}@{f['at']}" for f in result["failures"]]
            print(plan.id, *heard, len(result["hosts"]["node-0"]["kernel_log"]), flush=True)
    finally:
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--cuda", action="store_true", help="the plans that need two GPUs")
    parser.add_argument("--inside", action="store_true", help="we are in our namespaces")
    parser.add_argument("--limited", action="store_true", help="run the one plan in a cgroup")
    args = parser.parse_args()
    module = [sys.executable, "-m", __spec__.name]
    if not args.inside and not args.cuda:
        command = ["unshare", "--mount", "--net", *module, *sys.argv[1:], "--inside"]
        raise SystemExit(subprocess.run(command, check=False).returncode)
    for number in (signal.SIGINT, signal.SIGHUP):  # ranks inherit what we ignore
        signal.signal(number, signal.SIG_DFL)
    if args.inside:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    args.out.mkdir(parents=True, exist_ok=True)
    plans = DEVICE_PLANS if args.cuda else PLANS + DISK_PLANS
    chosen = [p for p in plans if args.word in p.id and not (args.out / f"{p.id}.json").exists()]
    if args.limited:
        chosen = [plan for plan in chosen if plan.id == args.word]
    size = chosen[0].memory if args.limited else 0
    with tempfile.TemporaryDirectory(prefix="record-") as work, limited(size):
        now = [plan for plan in chosen if args.limited or not plan.memory]
        if now:
            asyncio.run(record(now, args.out, Path(work)))
    for plan in chosen:
        if plan.memory and not args.limited:  # an agent of its own, which looks at its cgroup
            command = [*module, str(args.out), plan.id, "--inside", "--limited"]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
