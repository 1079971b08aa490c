"""`python -m tests.trainer.arguments.observed RUNS.json SEEN.json`: tiny runs, each in a fork, and what is to be
seen of each of them from outside of the arguments: tensors, counts, bytes.

RUNS: a list of `[world, rank, arguments]`; in a world above one the fellows are fake, and move nothing. In
arguments {base} is the folder of all, in which `made` puts what runs read, {own} the run's, and {copy} its own copy
of {base}/saved. SEEN: of each run what its views show, by their names.
"""

import contextlib
import functools
import gc
import gzip
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.trainer import pretrain_gpt, world
from elastic.trainer.arguments.data import TokenizerFlags
from elastic.trainer.current import current
from elastic.trainer.data import loader, tokenizers
from elastic.trainer.data.indexed import write
from elastic.trainer.model.gpt import GPT, Head
from elastic.trainer.model.layers import Block
from elastic.trainer.parallel.stage import LeanStage
from elastic.trainer.pretrain import pretrain
from elastic.trainer.run import optimizer as optimizers
from elastic.trainer.run import state as states
from elastic.trainer.run.feed import Feed
from elastic.trainer.run.loop import Loop
from elastic.trainer.run.step import Stepper
from elastic.trainer.run.told import TIMED
from elastic.trainer.watch import guard
from elastic.trainer.watch.reporter import Reporter
from elastic.trainer.watch.tensorboard import Board
from tests.trainer.arguments.tiny import SMALL
from tests.trainer.watch.boards import points

AT_ONCE = 2
"""Runs."""
SAVED = "--save {base}/saved --save-interval 1"
"""Arguments of the run that others begin from."""
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "gpt2"
TEXT = "hello the hello"
TIMES = (
    r"\[\d{4}-[^]]*\]|elapsed time per iteration \(ms\): [\d.]+|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|"
    r"\.\.: .*|rank +\d+: [\d.]+|(?<=phases).*"
)
"""What differs from run to run."""
Seen = dict[str, Any]


def digest(*arrays: Any) -> str:
    found = hashlib.sha256()
    for one in arrays:
        value = np.ascontiguousarray(one)
        found.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    return found.hexdigest()[:16]


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach().cpu()


def before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """`look` is called with what the function is called with, each time before it."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def looked_at(*given: Any, **named: Any) -> Any:
        look(*given, **named)
        return inner(*given, **named)

    setattr(owner, name, looked_at)


def after(owner: Any, name: str, look: Callable[..., None]) -> None:
    """`look` is called with what came of it, and what it was called with."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def looked_at(*given: Any, **named: Any) -> Any:
        found = inner(*given, **named)
        look(found, *given, **named)
        return found

    setattr(owner, name, looked_at)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What torch is asked to compute, collectives among it, forward and backward."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {str(one.dtype)[6:] for one in args if isinstance(one, torch.Tensor)}
        self.counts[f"{func.overloadpacket} {' '.join(sorted(kinds))}"] += 1
        return func(*args, **(kwargs or {}))


def watch_model(seen: Seen, *, counted: bool) -> None:
    """What the model is, and what it gets."""

    def begun(loop: Loop, run: Any) -> None:
        named = [(name, local(one)) for name, one in run.laid.model.named_parameters()]
        seen["weights"] = {name: list(one.shape) for name, one in named}
        seen["first"] = digest(*(one for _, one in named))
        wrapped = [one for one in run.laid.model.modules() if isinstance(one, FSDPModule)]
        groups: list[Any] = [one._get_fsdp_state()._fsdp_param_group for one in wrapped]
        policies = {type(one.offload_policy) for one in groups}
        seen["holders"] = [type(run.optimizer).__name__, sorted(one.__name__ for one in policies)]

    def gets(model: GPT, tokens: Any, position_ids: Any = None, *rest: Any, **more: Any) -> None:
        if tokens is not None:
            seen.setdefault("leaves", []).append(list(tokens.shape))
        told = None if position_ids is None else digest(position_ids)
        seen.setdefault("positions", []).append(told)

    def makes(found: Any, *_: Any, **__: Any) -> None:
        seen.setdefault("kinds", []).append(str(found.dtype))

    before(Loop, "__init__", begun)
    before(GPT, "forward", gets)
    after(Block, "forward", makes)
    if counted:
        train = Loop.train

        def counting(loop: Loop, start: int) -> int:
            counts: Counter[str] = Counter()
            with Counting(counts):
                done = train(loop, start)
            seen["ops"] = dict(counts)
            return done

        setattr(Loop, "train", counting)  # noqa: B010 - as mypy has it, of another type
    for name in ("forward_one_chunk", "backward_one_chunk"):

        def acts(stage: LeanStage, chunk: int, *_: Any, name: str = name, **__: Any) -> None:
            seen.setdefault("actions", []).append(f"{name[0]}{chunk} of {stage.stage_index}")

        before(LeanStage, name, acts)


def watch_graphs(seen: Seen) -> None:
    """How many graphs are compiled: by a compiler that leaves them as they are."""

    def compiled(graph: Any, _: Any) -> Any:
        seen["graphs"] = seen.get("graphs", 0) + 1
        return graph.forward

    inner = nn.Module.compile

    def compile_it(module: nn.Module, *given: Any, **named: Any) -> None:
        inner(module, *given, **named | {"backend": compiled})

    setattr(nn.Module, "compile", compile_it)  # noqa: B010
    setattr(Head, "compile_loss", lambda head: None)  # noqa: B010


def watch_reading(seen: Seen) -> None:
    """What is read, by whom, and for what."""
    evaluates = [False]
    seen.update(trained=[], evaluated=[], readers=[])
    evaluate = Loop.evaluate

    def evaluated(loop: Loop, step: int, **named: Any) -> None:
        evaluates[0] = True
        evaluate(loop, step, **named)
        evaluates[0] = False

    def read(share: Any, feed: Feed) -> None:
        places = [place for leaf in share.leaves for place in leaf.places.tolist()]
        seen["evaluated" if evaluates[0] else "trained"].append(places)

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers: int, **named: Any) -> None:
            seen["readers"].append([evaluates[0], workers])
            super().__init__(workers, **named)

    setattr(Loop, "evaluate", evaluated)  # noqa: B010
    after(Feed, "__next__", read)
    setattr(loader, "ThreadPoolExecutor", Pool)  # noqa: B010


class Ticks:
    """A clock that goes on by a second each time it is looked at."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1
        return self.time


def watch_numbers(seen: Seen) -> None:
    """Of each step what is told of it, what the optimizer is given, and what the guard makes of odd ones."""
    seen.update(losses=[], rates=[], batches=[], scales=[], decays=[], verdicts=[])

    def told(reporter: Reporter, step: Any) -> None:
        seen["losses"].append([step.losses, step.grad_norm])
        seen["rates"].append(step.learning_rate)
        seen["batches"].append([step.batch_size, step.consumed])
        seen["scales"].append([step.loss_scale, step.skipped])

    def stepped(_: Any, lr: float, weight_decay: float) -> None:
        seen["decays"].append(weight_decay)

    judge = guard.judge

    def judged(state: Any, found: Any, flags: Any) -> Any:
        """Of a run with spikes, sudden falls, NaN and an odd gradient, which never goes back."""
        number = found.iteration
        loss = 2 + math.sin(number * 12.9898) * 0.05
        loss += {22: 0.9, 23: 0.9, 24: 0.9, 26: -0.9}.get(number, 0)
        loss = math.nan if number in (8, 30, 32, 34, 36) else loss
        norm = math.exp(6.0 if number == 28 else math.sin(number * 78.233) * 0.3)
        state, verdict = judge(state, replace(found, loss=loss, grad_norm=norm), flags)
        if verdict is not None:
            seen["verdicts"].append(str(verdict))
            if verdict.action != "warn":
                return guard.gone_back(state, state, verdict, flags), None
        return state, verdict

    make = Reporter.__init__

    def made(reporter: Reporter, *given: Any, **named: Any) -> None:
        make(reporter, *given, **named | {"now": Ticks()})
        boards = [one.writer for one in reporter._sinks if isinstance(one, Board)]
        seen["queues"] = [writer.max_queue for writer in boards if writer is not None]

    before(Reporter, "step", told)
    before(optimizers, "set_rates", stepped)
    setattr(guard, "judge", judged)  # noqa: B010
    setattr(Reporter, "__init__", made)  # noqa: B010


def watch_wandb(seen: Seen) -> None:
    seen["wandb"] = calls = []

    def init(config: object, **settings: object) -> SimpleNamespace:
        """config: all arguments, whatever they do."""
        calls.append(re.sub(r"'/[^']*/", "'", str(settings)))
        return SimpleNamespace(
            log=lambda *values, step: calls.append(f"{values} {step}"), finish=lambda: None
        )

    stand_in = ModuleType("wandb")
    stand_in.__dict__["init"] = init
    sys.modules["wandb"] = stand_in


def watch_data(seen: Seen) -> Callable[..., Any]:
    """The provider of data, which also looks at them."""

    def provider(numbers: Any) -> Any:
        seen["asked"] = list(numbers)
        found = pretrain_gpt.train_valid_test_datasets_provider(numbers)
        sets = [one for made in found for one in (made if isinstance(made, list) else [made])]
        seen["data"] = [
            [
                getattr(one, "name", ""),
                *(digest(*one[number].values()) for number in range(min(4, len(one)))),
            ]
            for one in sets
            if one is not None
        ]
        if current().settings.tokenizer.kind != "NullTokenizer":
            seen["ids"] = current().tokenizer.encode([TEXT])
            seen["ends"] = current().tokenizer.eod
        return found

    return provider


def be_one_of(size: int, rank: int) -> None:
    """Rank `rank` of a world whose others are fake."""

    def join(backend: str, device_id: Any) -> None:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    def moved(_: Any, op: Any, tensor: torch.Tensor, *given: Any, **named: Any) -> None:
        if op is dist.irecv:
            tensor.detach().zero_()  # nothing comes

    def voted(stage: LeanStage, **_: Any) -> torch.Tensor:
        return torch.ones(1)  # that each stage knows its shapes

    before(dist.P2POp, "__init__", moved)
    setattr(Stepper, "_told_to_all", lambda *_: ['{"lm loss": [0, 0]}'])  # noqa: B010 - nobody says it
    setattr(world, "_join", join)  # noqa: B010
    setattr(LeanStage, "_warmup_backward_result", voted)  # noqa: B010
    setattr(states, "agree", lambda *_, **__: None)  # noqa: B010 - it would count votes


def seen_of(size: int, rank: int, said: str, folder: Path, base: Path) -> Seen:
    """Of one run."""
    seen: Seen = {}
    if "{copy}" in said:
        shutil.copytree(base / "saved", folder / "copy")
    said = said.replace("{copy}", str(folder / "copy")).replace("{own}", str(folder))
    counted, said = "COUNTED" in said, said.replace("COUNTED", "")
    watch_model(seen, counted=counted)
    if "--compile" in said:
        watch_graphs(seen)
    watch_reading(seen)
    watch_numbers(seen)
    watch_wandb(seen)
    if size > 1:
        be_one_of(size, rank)
    sys.argv = ["pretrain_gpt", *words_of(said, base)]
    output, status = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            pretrain(watch_data(seen), pretrain_gpt.model_provider, None, pretrain_gpt.forward_step)
        except SystemExit as ended:
            status = int(ended.code or 0)
    text = output.getvalue().replace(str(folder), "").replace(str(base), "")
    _, _, steps = text.partition("from step ")
    seen["status"], seen["all"] = status, text
    seen["text"] = [re.sub(TIMES, "", line) for line in steps.splitlines()]
    seen["files"] = sorted(
        {
            re.sub(r"shard.*|events.out.*", "", str(one.relative_to(folder)))
            for one in folder.rglob("*")
        }
    )
    if (folder / "t").exists():
        board = points(folder / "t")
        timed = {f"{name}-time" for name in TIMED}
        seen["timed"] = {tag: len(board[tag]) for tag in sorted(timed & board.keys())}
        seen["board"] = {tag: value for tag, value in board.items() if tag not in timed}
    seen["metrics"] = [
        re.sub(r'"time": [^,}]*', "", one.read_text()) for one in sorted(folder.glob("*.jsonl"))
    ]
    seen["profiled"] = [
        sorted(
            {
                int(one)
                for one in re.findall(
                    r"ProfilerStep#(\d+)", gzip.decompress(file.read_bytes()).decode()
                )
            }
        )
        for file in sorted(folder.rglob("*.pt.trace.json.gz"))
    ]
    return seen


def words_of(said: str, base: Path) -> list[str]:
    """--no-batch: without --global-batch-size; --in-samples N: as long as that, not counted in iterations. Of data
    that are given twice, which is refused, the last."""
    said = said.replace("{base}", str(base)).replace("BASE", str(base))
    if "--no-batch" in said:
        said = re.sub("--no-batch|--global-batch-size 4", "", said)
    if "--in-samples" in said:
        said = said.replace("--train-iters 3", "").replace("--in-samples", "--train-samples")
    said = re.sub(r"(--[\w-]*data-path)( (?!--)\S+)+(?=.* \1 )", "", said)
    return said.split()


def made(base: Path) -> None:
    """What runs read."""
    for name, first in (("a", 0), ("b", 50)):
        with write(base / name, np.dtype("<u2")) as writer:
            for number in range(60):
                writer.add_document([[*(first + (number * 7 + k) % 40 for k in range(8)), 100]])
    (base / "c").mkdir()
    for kind in ("bin", "idx"):
        shutil.copy(base / f"b.{kind}", base / "c" / f"a.{kind}")
    (base / "probes").write_text('{"name": "one", "text": "1 2 3 4"}\n')
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(GOLDEN / name, base / name)
    merges = (GOLDEN / "merges.txt").read_text().splitlines()
    (base / "fewer.txt").write_text("\n".join(merges[:2]) + "\n")
    words = json.loads((GOLDEN / "vocab.json").read_text())
    (base / "more.json").write_text(json.dumps(words | {"zzz": 50300}))
    flags = TokenizerFlags(vocab_file=base / "vocab.json", merge_file=base / "merges.txt")
    for name in ("words", "others"):
        (base / name).mkdir()
        tokenizers.build(flags).save(base / name)
    config = base / "others" / tokenizers.CONFIG_NAME
    config.write_text('{"eos_token": "!"}')


def warm_up() -> None:
    """What torch loads and makes late, before there are forks that would do it each."""
    sys.argv = ["pretrain_gpt", *SMALL.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(
            pretrain_gpt.train_valid_test_datasets_provider, pretrain_gpt.model_provider, None,
            pretrain_gpt.forward_step,
        )  # fmt: skip


def main() -> None:
    runs, place = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    base = place.parent
    made(base)
    torch.set_num_threads(1)
    warm_up()
    gc.freeze()  # forks need not look through it
    under_way: dict[int, int] = {}
    failed: list[int] = []

    def wait() -> None:
        pid, status = os.wait()
        number = under_way.pop(pid)
        if status:
            failed.append(number)

    for number, (size, rank, said) in enumerate(runs):
        while len(under_way) >= AT_ONCE or (
            number == 1 and under_way
        ):  # others begin from the first
            wait()
        if (pid := os.fork()) == 0:
            try:
                folder = base / f"run{number}"
                folder.mkdir()
                began = time.monotonic()
                seen = seen_of(size, rank, f"{SMALL} {said}", folder, base)
                seen["seconds"] = time.monotonic() - began
                (base / f"{number}.json").write_text(json.dumps(seen))
                os._exit(0)
            except BaseException:  # noqa: BLE001 - nothing may go on in a fork
                sys.stderr.write(f"{said}:\n{traceback.format_exc()}")
                sys.stderr.flush()
                os._exit(1)
        under_way[pid] = number
    while under_way:
        wait()
    if failed:
        raise SystemExit(f"these have failed: {[runs[number] for number in failed]}")
    found = [json.loads((base / f"{number}.json").read_text()) for number in range(len(runs))]
    place.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
