"""A model that trains on real text for some minutes while it is shot at, and its loss as a picture.

    python -m benchmarks.curve prepare TEXT [--root FOLDER]   # source code of Python below FOLDER, as tokens
    python -m benchmarks.curve run TEXT OUT [--minutes 8] [--gpus 2] [ARGUMENT ...]   # of pretrain_gpt
    python -m benchmarks.curve draw OUT

Two nodes on one machine, each with half of its GPUs, run one job. A rank of each is killed by SIGKILL, then all
of the second node, which is started again later: so the world halves and doubles. In the end the job drains.
The text is read from Megatron's files, so the device's wait for data is told, too. OUT gets `metrics.jsonl`, `events.json`, the master's `report.json`, and `curve.svg`.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic.trainer.data import prepare
from elastic.trainer.watch import jsonl

BYTES = 40_000_000
WORDS = 16384
ENDPOINT = "127.0.0.1:29417"
FAULTS = ((0.2, "rank", 0), (0.4, "rank", 1), (0.55, "node", 1), (0.7, "back", 1))
"""At which part of the time what happens to which node."""
TOGETHER = 120.0
"""Seconds for the first step of both."""
MODEL = (
    "--num-layers=12", "--hidden-size=768", "--num-attention-heads=12", "--seq-length=1024",
    "--micro-batch-size=16", "--global-batch-size=256", "--bf16", "--compile", "--lr=6e-4",
    "--lr-decay-style=constant", "--lr-warmup-iters=100", "--hidden-dropout=0",
    "--attention-dropout=0", "--train-iters=1000000", "--log-interval=1", "--eval-iters=0",
    "--split=98,1,1", "--save-interval=100", "--adam-beta2=0.95", "--weight-decay=0.1",
)  # fmt: skip


class Nodes:
    """The job's two launchers."""

    def __init__(self, text: Path, out: Path, gpus: int, more: Sequence[str]) -> None:
        self._out, self._gpus, self.world = out, gpus, 2 * max(1, gpus // 2)
        names = (prepare.VOCAB_NAME, prepare.MERGES_NAME)
        vocabulary, merges = (text / name for name in names)
        self._trainer = (
            *MODEL, f"--data-path={text / prepare.PREFIX}", f"--vocab-file={vocabulary}",
            f"--merge-file={merges}", f"--data-cache-path={out / 'cache'}", f"--save={out / 'save'}",
            f"--metrics-file={out / 'metrics.jsonl'}", f"--trace-phases={out / 'traces'}", *more,
        )  # fmt: skip
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        half = self.world // 2
        command = [sys.executable, "-m", "elastic.run", "--nnodes=1:2", f"--nproc-per-node={half}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ENDPOINT}", "--rdzv-id=curve"]
        command += [f"--rdzv-conf=is_host={int(node == 0)}", f"--node-id=node-{node}"]
        command += ["--last-call=3", "--redirects=3", f"--log-dir={self._out / 'logs'}"]
        command += ["--max-restarts=1000", f"--report={self._out / 'report.json'}"]
        command += ["-m", "elastic.trainer.pretrain_gpt", *self._trainer]
        mine = range(node * half, (node + 1) * half) if self._gpus else ()
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))}
        with (self._out / f"node-{node}.log").open("ab") as log:
            self._launchers[node] = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def kill_rank(self, node: int) -> None:
        """The first one of the node."""
        os.kill(self._status()["nodes"][node]["ranks"][0]["pid"], signal.SIGKILL)

    def kill_node(self, node: int) -> None:
        """All of it."""
        launcher = psutil.Process(self._launchers[node].pid)
        for process in (launcher, *launcher.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._launchers[node].wait()

    def drain(self) -> list[int]:
        """Save and leave; exit statuses of the launchers."""
        self._ctl("drain")
        return [launcher.wait(120) for launcher in self._launchers.values()]

    def close(self) -> None:
        for node, launcher in self._launchers.items():
            if launcher.poll() is None:
                self.kill_node(node)

    def running(self) -> bool:
        return self._launchers[0].poll() is None

    def _status(self) -> Any:
        return json.loads(self._ctl("-o", "json", "status"))

    def _ctl(self, *words: str) -> str:
        command = [sys.executable, "-m", "elastic.ctl", f"--master={ENDPOINT}", *words]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def run(text: Path, out: Path, minutes: float, gpus: int, more: Sequence[str]) -> int:
    """Status 1 where the job ends otherwise than by its drain."""
    out.mkdir(parents=True)
    nodes, events = Nodes(text, out, gpus, more), []
    try:
        nodes.start(0)
        nodes.start(1)
        latest = time.time() + TOGETHER
        while not (whole := [one for one in _steps(out) if one["world_size"] == nodes.world]):
            if time.time() > latest:
                raise SystemExit(f"no step of {nodes.world} ranks: see node-0.log and node-1.log")
            _wait(nodes, 0.5)
        began = whole[0]["time"]
        for share, what, node in FAULTS:
            while time.time() < began + share * minutes * 60:
                _wait(nodes, 0.2)
            acts = {"rank": nodes.kill_rank, "node": nodes.kill_node, "back": nodes.start}
            acts[what](node)
            events.append({"time": time.time(), "what": what, "node": node})
            sys.stdout.write(f"{time.time() - began:6.1f} s: {what} of node-{node}\n")
        while time.time() < began + minutes * 60:
            _wait(nodes, 0.2)
        statuses = nodes.drain()
    finally:
        nodes.close()
    (out / "events.json").write_text(json.dumps({"began": began, "events": events}, indent=1))
    steps = jsonl.steps(out / "metrics.jsonl")
    last = max(steps)
    sys.stdout.write(
        f"{last} steps, loss {_loss(steps[last]):.3f}, data wait {_data_wait(out):.2%} of steps, "
        f"exit statuses {statuses}\n"
    )
    return int(any(statuses))


def _wait(nodes: Nodes, seconds: float) -> None:
    if not nodes.running():
        raise SystemExit("the job is over before its time: see node-0.log")
    time.sleep(seconds)


def _steps(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    return [one for one in jsonl.read(file) if one["kind"] == "step"] if file.exists() else []


def _data_wait(out: Path) -> float:
    """The part of all steps in which the device waited for data."""
    lines = jsonl.read(out / "metrics.jsonl")
    told: list[dict[str, float]] = [one["phases"] for one in lines if one["kind"] == "phases"]
    return sum(one.get("data", 0.0) for one in told) / sum(sum(one.values()) for one in told)


def _loss(step: dict[str, Any]) -> float:
    return float(step["losses"]["lm loss"])


# --- the picture --------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BELOW = 900, 420, 50, 40
SAYS = {
    "rank": "SIGKILL to a rank", "node": "SIGKILL to node-1: half the world", "back": "node-1 is back",
}  # fmt: skip


def draw(out: Path) -> str:
    """SVG: the loss of each step that was run, also of those run again, by seconds."""
    told: dict[str, Any] = json.loads((out / "events.json").read_text())
    points = [(one["time"] - told["began"], _loss(one)) for one in _steps(out)]
    longest: float = max(at for at, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * at / longest

    def y(loss: float) -> float:
        return 10 + (HEIGHT - BELOW - 10) * (high - loss) / (high - low)

    line = " ".join(f"{x(at):.1f},{y(loss):.1f}" for at, loss in points)
    parts = [f'<polyline fill="none" stroke="#1f77b4" points="{line}"/>']
    parts += _axes(x, y, longest, low, high)
    for number, event in enumerate(told["events"]):
        at = x(event["time"] - told["began"])
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="10" y2="{HEIGHT - BELOW}" stroke="#d62728" '
            f'stroke-dasharray="4"/><text x="{at + 4:.1f}" y="{24 + 16 * number}">{SAYS[event["what"]]}</text>'
        )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _axes(
    x: Callable[[float], float],
    y: Callable[[float], float],
    longest: float,
    low: float,
    high: float,
) -> Iterator[str]:
    for at in range(0, int(longest) + 1, 60 if longest > 120 else 10):
        yield f'<text x="{x(at):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{at} s</text>'
    for loss in range(int(low) + 1, int(high) + 1):
        yield (
            f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>'
            f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>'
        )
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">lm loss of each step that was run</text>'


# --- the text -----------------------------------------------------------------------------------


def source(root: Path) -> Iterator[str]:
    """Files of Python below `root`, up to so many bytes."""
    used = 0
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        used += len(text.encode())
        if used > BYTES:
            return
        if text:
            yield text


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curve", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("prepare")
    verb.add_argument("text", type=Path)
    verb.add_argument("--root", type=Path, default=Path(sysconfig.get_path("purelib")))
    verb = verbs.add_parser("run")
    verb.add_argument("text", type=Path)
    verb.add_argument("out", type=Path)
    verb.add_argument("--minutes", type=float, default=8.0)
    verb.add_argument("--gpus", type=int, default=2, help="0: two ranks on CPUs")
    verb = verbs.add_parser("draw")
    verb.add_argument("out", type=Path)
    args, more = parser.parse_known_args()
    if args.verb == "prepare":
        args.text.mkdir(parents=True)
        texts = list(source(args.root))
        if not texts:
            parser.error(f"{args.root} has no Python source: give --root")
        prepare.build(args.text, texts, vocab_size=WORDS)
        return 0
    if args.verb == "run" and (status := run(args.text, args.out, args.minutes, args.gpus, more)):
        return status
    (args.out / "curve.svg").write_text(draw(args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
