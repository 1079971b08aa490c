"""One run of the demo: two nodes start, a rank dies, a node dies, the node comes back."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from elastic.proto.security import Security
from elastic.trainer.data.prepare import MERGES_NAME, PREFIX, VOCAB_NAME, prepare
from scripts.demo_nodes import Job, Node, free_endpoint
from scripts.demo_screen import plain, screen
from scripts.demo_story import (
    RankLog,
    Recovery,
    Story,
    follow_log,
    follow_master,
    recovery,
)

MODEL = (
    "--num-layers=2", "--hidden-size=128", "--num-attention-heads=4", "--seq-length=64",
    "--hidden-dropout=0", "--attention-dropout=0", "--init-method-std=0.04",
    "--micro-batch-size=6", "--global-batch-size=24", "--lr=3e-3", "--min-lr=3e-4",
    "--lr-decay-style=cosine", "--lr-warmup-iters=50", "--weight-decay=0.1", "--adam-beta2=0.95",
    "--use-distributed-optimizer", "--log-interval=5", "--eval-iters=0",
)  # fmt: skip
"""A GPT for two CPU cores, in fp32: without AVX-512 a product in bf16 takes ten times as long."""
VICTIM = 1
"""The rank that is killed; it is on the node that stays."""
LINES = 20
"""Steps that plain output shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the command line asks for."""

    out: Path
    """Folder of everything that the demo writes, emptied first."""
    steps: int
    """Optimizer steps in all."""
    save_interval: int
    """Steps between checkpoints on storage; every step is in memory."""
    timeout: float
    """Seconds after which the demo gives up."""
    live: bool
    """A screen that is drawn again and again, not lines."""
    svg: Path | None
    """Where the terminal's picture goes."""
    extra: tuple[str, ...]
    """More arguments for the training script."""

    vocab_size: int
    """Words that the tokenizer learns at most."""
    corpus_bytes: int
    """Bytes of text that are trained on at most."""

    @property
    def data(self) -> Path:
        """What is trained on."""
        return self.out / "data"

    @property
    def trainer(self) -> tuple[str, ...]:
        """The training script's arguments; later ones win."""
        return (
            *MODEL,
            f"--data-path={self.data / PREFIX}",
            f"--vocab-file={self.data / VOCAB_NAME}",
            f"--merge-file={self.data / MERGES_NAME}",
            f"--save={self.out / 'checkpoints'}",
            f"--train-iters={self.steps}",
            f"--save-interval={self.save_interval}",
            *self.extra,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something that the demo did to the job, and what became of it."""

    what: str
    """In words."""
    expected: str
    """The cause that the master should find."""
    resumed_from: int
    """The step from which training went on."""
    recovery: Recovery


class Demo:
    """One run: its two nodes, its story, the faults."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan = plan
        self.story = Story()
        self.faults: list[Fault] = []
        self._console = console
        self._printed = 0
        self._printed_step = 0
        self._nodes: dict[str, Node] = {}
        self._log = RankLog(plan.out)
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Train to the end. Raises JobEnded or TimeoutError where it comes to no good one."""
        try:
            async with asyncio.timeout(self.plan.timeout), self._shown():
                await self._start()
                await self._lose_a_rank()
                await self._lose_a_node()
                await self._bring_it_back()
                for node in self._nodes.values():
                    await node.wait()
                self.story.read(self._log.new_lines())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(node.stop() for node in self._nodes.values()))

    def exit_codes(self) -> dict[str, int | None]:
        """Of the launchers, by node."""
        return {name: node.exit_code for name, node in self._nodes.items()}

    # --- the nodes -------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Both nodes; the first has the master."""
        plan, story = self.plan, self.story
        story.note("demo", "Python's standard library becomes tokens")
        await asyncio.to_thread(
            prepare, plan.data, vocab_size=plan.vocab_size, max_bytes=plan.corpus_bytes
        )
        security = Security(token=secrets.token_hex(16))
        job = Job(
            out=plan.out,
            endpoint=free_endpoint(),
            token_file=plan.out / "token",
            trainer=plan.trainer,
        )
        job.token_file.touch(mode=0o600)
        job.token_file.write_text(security.token)
        self._log = RankLog(job.logs)
        self._nodes = {
            "node-a": Node("node-a", job, hosts_master=True),
            "node-b": Node("node-b", job, hosts_master=False),
        }
        for node in self._nodes.values():
            master = f", with the master on {job.endpoint}" if node.name == "node-a" else ""
            story.note("demo", f"{node.name} starts{master}")
            await node.start()
        self._tasks = [
            asyncio.create_task(follow_master(story, job.endpoint, security)),
            asyncio.create_task(follow_log(story, self._log)),
            asyncio.create_task(self._watch(self._nodes["node-a"])),
        ]

    async def _watch(self, node: Node) -> None:
        """Tell the story that the job is over once the launcher with the master has ended."""
        code = await node.wait()
        self.story.over = f"{node.name} ended with {code}: {node.last_words(1)}"
        self.story.touch()

    # --- the faults ------------------------------------------------------------------------------

    async def _reach(self, share: float) -> None:
        """Wait for that share of all steps."""
        await self.story.until(lambda: self.story.step >= share * self.plan.steps)

    async def _lose_a_rank(self) -> None:
        await self._reach(0.2)
        await self.story.until(lambda: self.story.pid_of(VICTIM) > 0)
        pid = self.story.pid_of(VICTIM)
        before = len(self.story.interruptions)
        self.story.note("fault", f"SIGKILL to rank {VICTIM} (process {pid})")
        os.kill(pid, signal.SIGKILL)
        await self._recovered(f"rank {VICTIM} killed", "killed", before)

    async def _lose_a_node(self) -> None:
        await self._reach(0.4)
        before = len(self.story.interruptions)
        self.story.note("fault", "SIGKILL to all of node-b at once: launcher, agent and ranks")
        await self._nodes["node-b"].kill()
        await self._recovered("node-b killed", "node lost", before)

    async def _bring_it_back(self) -> None:
        """At once: training goes on while it imports torch, and must not be over before it has."""
        before = len(self.story.interruptions)
        self.story.note("demo", "node-b starts again")
        await self._nodes["node-b"].start()
        await self._recovered("node-b back", "more nodes", before)

    async def _recovered(self, what: str, expected: str, before: int) -> None:
        """Wait until training goes on after interruption number `before`."""
        story = self.story
        await story.until(lambda: recovery(story.interruptions, before) is not None)
        found = recovery(story.interruptions, before)
        assert found is not None
        story.read(self._log.new_lines())
        start = found.step_after - 1 if found.step_after else story.resumed
        self.faults.append(Fault(what=what, expected=expected, resumed_from=start, recovery=found))
        story.note(
            "recovered",
            f"{what}: back after {found.seconds:.2f} s, on from step {start} "
            f"(it was at {max(found.step_before, story.reached)})",
        )

    # --- what is shown ---------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _shown(self) -> AsyncIterator[None]:
        """Show the story while it unfolds, and its last state at the end."""
        task = asyncio.create_task(self._show_live() if self.plan.live else self._show_lines())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not self.plan.live:
                self._print_new()

    async def _show_live(self) -> None:
        with Live(console=self._console, auto_refresh=False, get_renderable=self.frame) as live:
            try:
                while True:
                    live.refresh()
                    await asyncio.sleep(0.2)
            finally:
                live.refresh()

    def frame(self, height: int = 0) -> RenderableType:
        """The screen as it is now; of the terminal's height if none is given."""
        return screen(
            self.story, self.plan.steps, ("node-a", "node-b"), height or self._console.height
        )

    async def _show_lines(self) -> None:
        while True:
            self._print_new()
            await asyncio.sleep(0.1)

    def _print_new(self) -> None:
        story = self.story
        while self._printed < len(story.notes):
            self._say(plain(story.notes[self._printed]))
            self._printed += 1
        apart = max(1, self.plan.steps // LINES)
        if story.losses and abs(story.step - self._printed_step) >= apart:
            self._printed_step, loss = story.losses[-1]
            world = f"world {story.status.world_size}"
            self._say(
                f"{story.now():6.1f} s  step {self._printed_step:>4}  loss {loss:.3f}  {world}"
            )

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
