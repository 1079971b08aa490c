"""A 125M job that is killed in every phase and resized, beside one that never was: `python -m benchmarks.resize`.

Both train exact, compiled, in bf16. The one runs on all devices; the other's parts run on the numbers of
devices that `--worlds` names, with a SIGKILL in forward, backward, optimizer, save and restore. Then losses,
norms and parameters are compared bit for bit; and what was restored behind a kill came from memory, but where the
kill was in a part's first restore, from storage.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from elastic.trainer.checkpoints import load_model, opened
from elastic.trainer.watch import jsonl

RESTORED = re.compile(r"round (\d+) (begins anew|goes on from [^\n]*)")
"""What the launcher says of a round."""
PHASES = ("forward", "backward", "optimizer", "save", "restore")
MODEL = (
    "--num-layers=12", "--hidden-size=768", "--num-attention-heads=12", "--seq-length=1024",
    "--micro-batch-size=8", "--mock-data", "--vocab-size=50303", "--hidden-dropout=0",
    "--attention-dropout=0", "--bf16", "--compile", "--lr=6e-4", "--min-lr=6e-5",
    "--lr-decay-style=cosine", "--lr-warmup-iters=10", "--log-interval=1", "--eval-iters=0",
    "--weight-decay=0.1", "--adam-beta2=0.95",
)  # fmt: skip


def run(
    out: Path, name: str, ranks: int, flags: Sequence[str], faults: str, more: Mapping[str, str]
) -> tuple[float, list[str]]:
    """Seconds that it took, and from where each round but the first went on."""
    folder = out / f"{name}-faults"
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "elastic.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--log-dir={out / 'logs'}", "-m", "tests.trainer.faulty", *MODEL]
    command += [f"--save={out / name}", f"--metrics-file={out / name}.jsonl", *flags]
    env = {
        **os.environ,
        **more,
        "PYTHONFAULTHANDLER": "1",
        "ELASTIC_LOGLEVEL": "INFO",
        "FAULTS": faults,
        "FAULTS_FOLDER": str(folder),
    }
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stdout[-800:]}{done.stderr[-4000:]}")
    took = time.perf_counter() - began
    return took, list(dict(RESTORED.findall(done.stderr)).values())[1:]


def steps(out: Path, name: str) -> dict[int, tuple[float, float]]:
    """Loss and norm of each."""
    found = jsonl.steps(out / f"{name}.jsonl")
    return {step: (line["losses"]["lm loss"], line["grad_norm"]) for step, line in found.items()}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resize", description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[4, 3, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--leaves", type=int, default=12)
    parser.add_argument("--out", type=Path, help="what came of it, as JSON")
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), args.worlds, args.steps, args.leaves, more)
    for key, value in found.items():
        sys.stdout.write(f"{key}: {value}\n")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    good = (
        found["parameters that differ"] == 0
        and found["losses and norms equal"] == found["steps"]
        and found["faults that struck"] == len(PHASES)
        and found["restored from storage"] in (0, 1)
    )
    return 0 if good else 1


def measure(
    out: Path, worlds: Sequence[int], count: int, leaves: int, more: Sequence[str]
) -> dict[str, object]:
    """Both runs, and how far apart they end."""
    flags = [f"--train-iters={count}", f"--global-batch-size={8 * leaves}", *more]
    alone, _ = run(out, "whole", max(worlds), flags, "", {})
    seconds, restores, faults = [], list[str](), ""
    ends = [count * (number + 1) // len(worlds) for number in range(len(worlds))]
    for number, (ranks, end) in enumerate(zip(worlds, ends, strict=True)):
        begin = ends[number - 1] if number else 0
        for nth, phase in enumerate(PHASES[number :: len(worlds)]):
            faults += f" {phase}@{0 if phase == 'restore' else begin + 2 + nth}:{ranks - 1}"
        part = [*flags, f"--exit-interval={end}"]
        took, later = run(out, "resized", ranks, part, faults, {})
        seconds.append(round(took, 1))
        restores += later
    one, other = steps(out, "whole"), steps(out, "resized")
    struck = sorted(note.name for note in (out / "resized-faults").iterdir())
    same = [one[step] == other.get(step) for step in one]
    left, right = (
        load_model(opened(str(out / name))).state_dict() for name in ("whole", "resized")
    )
    differ = sum(int((left[name] != right[name]).sum()) for name in left)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "worlds": list(worlds), "steps": len(one), "losses and norms equal": sum(same),
        "parameters": sum(one.numel() for one in left.values()), "parameters that differ": differ,
        "faults that struck": len(struck), "struck": struck,
        "restored from storage": sum(not one.endswith(", in memory") for one in restores),
        "restores": restores,
        "seconds of the whole run": round(alone, 1), "seconds of the parts": seconds,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
