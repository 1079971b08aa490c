"""The demo's nodes: launchers on this machine, each with all that descends from it."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
RUN_ID = "demo"
RANKS = 2
"""Ranks of a node."""
PATIENCE = 10.0
"""Seconds from SIGTERM to SIGKILL for a launcher."""

_NOT_PASSED_ON = ("ELASTIC_", "PET_", "TORCHELASTIC_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all launchers of the job have in common."""

    out: Path
    """Folder of everything that the demo writes."""
    endpoint: str
    """host:port of the master, on loopback."""
    token_file: Path
    """Keeps everybody else on this machine out of the job; `elasticctl` takes it too."""
    trainer: tuple[str, ...]
    """Arguments of the training script."""

    @property
    def logs(self) -> Path:
        """Folder with one `attempt_<n>` a round."""
        return self.out / "logs" / RUN_ID


class Node:
    """One launcher and its processes; may be killed and started again."""

    def __init__(self, name: str, job: Job, *, hosts_master: bool) -> None:
        self.name = name
        self.console = job.out / f"{name}.log"
        self._job = job
        self._hosts_master = hosts_master
        self._process: asyncio.subprocess.Process | None = None

    @property
    def exit_code(self) -> int | None:
        """Of the launcher; None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start the launcher; what it says goes to `console`."""
        job = self._job
        command = [sys.executable, "-m", "elastic.run"]
        command += ["--nnodes=1:2", f"--nproc-per-node={RANKS}", f"--node-id={self.name}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={job.endpoint}"]
        command += [f"--rdzv-id={RUN_ID}", f"--rdzv-conf=is_host={int(self._hosts_master)}"]
        command += [f"--token-file={job.token_file}"]
        command += ["--last-call=3"]  # the first round waits for both nodes
        command += [f"--log-dir={job.out / 'logs'}", "--redirects=3"]
        command += [f"--report={job.out / 'report.json'}"]
        command += ["-m", "elastic.trainer.pretrain_gpt", *job.trainer]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
        environ["OMP_NUM_THREADS"] = "1"
        environ["CUDA_VISIBLE_DEVICES"] = ""  # two nodes on one machine would share its GPUs
        with self.console.open("ab") as console:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                env=environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,  # a ^C at the terminal is ours to deal with
            )

    async def wait(self) -> int:
        """The launcher's exit code, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> int:
        """SIGKILL all of the node at one moment, as a power cut would; returns how many."""
        assert self._process is not None
        stopped: dict[int, psutil.Process] = {}
        # Nobody on the node may see another one end, say goodbye, or start something in its place.
        while fresh := [p for p in _tree(self._process.pid) if p.pid not in stopped]:
            for process in fresh:
                stopped[process.pid] = process
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
        # Children first: a parent's end would wake up those who stopped (an orphaned process group).
        for process in reversed(stopped.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await self._process.wait()
        return len(stopped)

    async def stop(self) -> None:
        """End the launcher in order if it still runs, by force if that takes too long."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(PATIENCE):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    def last_words(self, lines: int = 5) -> str:
        """The end of what the launcher said."""
        with contextlib.suppress(OSError):
            return "\n".join(self.console.read_text(errors="replace").splitlines()[-lines:])
        return ""


def free_endpoint() -> str:
    """An address that nobody else on this machine will bind between now and the launcher's doing so.

    Linux answers on all of 127.0.0.0/8, and a host there that is drawn by lot is ours alone.
    """
    host = "127." + ".".join(str(1 + secrets.randbelow(253)) for _ in range(3))
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def sweep() -> None:
    """End and reap whatever is left of all nodes; this process is their subreaper."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []
