"""A program: a matmul, then allgathers between pairs of nodes, one process for each of their devices.

`python -m elastic.agent.probes.pair --stores HOST:PORT,... --rank R --world W --device cpu|cuda --deadline S`
is run for every rank of a group of nodes; node n has the ranks from n x `--per-node` on. `--pairs 0-1,0-2`
says which nodes are tested with each other, in this order (0-1 by itself for two), `--stores` where each of
these pairs meets, at one of its two: what a third node has to do with says nothing of them. At the end it prints one
line of JSON and nothing else on stdout:

    {"probe": "pair", "ok": bool, "what": "<in words, empty when ok>", "figures": {
        "alone": bool,            # true: failed or hung in its own work, the allgathers were not reached
        "matmul_s": float,        # median of one
        "pairs": [{"with": node, "outcome": "passed" | "failed" | "timed out" | "not tested",
                   "what": "", "gather_s": float, "gb_s": float}, ...]}}

It ends by its deadline, whatever hangs: a thread says what it was at and leaves; if the interpreter is
stuck as well, faulthandler's own thread ends it 2 s later, with the stacks on stderr and no JSON.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elastic.agent.probes.program import begin
from elastic.proto import env

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_GATHERS = 5
_MIB = {"cpu": 8.0, "cuda": 64.0}
"""That each process sends in an allgather."""
_LOOK = 0.2
"""Seconds between looks at whether the other one has given up."""
_LAST_WORD = 1.0
"""Seconds for a process to end as the other one did."""
_REACH = 20.0
"""Seconds to reach a store, which serves by then."""
_FINE, _FAILED = "fine", "failed"
"""What a process says of itself where a pair meets."""
_TELL = 2.0
"""Seconds to tell others that this one failed by itself."""
_MARGIN = 1.0
"""Seconds before the deadline at which the last pair is given up."""


class Mismatch(Exception):
    """A result is not what it has to be."""


@dataclass(kw_only=True)
class Report:
    """What will be printed; whoever ends the process first prints it."""

    out: int
    """The descriptor of what was stdout."""
    doing: str = "starting"
    alone: bool = True
    """Nothing of the work so far needs another node."""
    figures: dict[str, Any] = field(default_factory=dict)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    _once: threading.Lock = field(default_factory=threading.Lock)

    def end(self, what: str) -> None:
        """Print it and end the process. what: failed; empty where all that was tested passed."""
        if not self._once.acquire(blocking=False):
            threading.Event().wait()  # the other is about to end this process
        wrong = [f"with node {p['with']}: {p['what']}" for p in self.pairs if p["what"]]
        what = what or "; ".join(wrong)
        figures = {"alone": bool(what) and self.alone, **self.figures, "pairs": self.pairs}
        said = {"probe": "pair", "ok": not what, "what": what, "figures": figures}
        with contextlib.suppress(OSError):
            os.write(self.out, json.dumps(said).encode() + b"\n")
        os._exit(1 if what else 0)  # threads may hang, and what they hold would be waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Who this process is, and until when."""

    stores: tuple[tuple[str, int], ...]
    """At which each pair meets, of one of its nodes."""
    prefix: str
    rank: int
    world: int
    per_node: int
    device: str
    pairs: tuple[tuple[int, int], ...]
    mib: float
    deadline: float
    """On the monotonic clock."""

    @property
    def node(self) -> int:
        return self.rank // self.per_node

    @property
    def torch(self) -> str:
        """The device's name in torch, which sees no other one."""
        return "cuda:0" if self.device == "cuda" else "cpu"

    @property
    def mine(self) -> list[tuple[int, tuple[int, int]]]:
        """Pairs that this node is in, each with its number."""
        return [(n, pair) for n, pair in enumerate(self.pairs) if self.node in pair]

    def ranks(self, pair: tuple[int, int]) -> list[int]:
        """Of both nodes, in their order in the pair."""
        return [node * self.per_node + local for node in pair for local in range(self.per_node)]

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


def main(args: Sequence[str]) -> None:
    """Never returns."""
    started = time.monotonic()
    options = _parser().parse_args(args)
    answers = begin(options.parent)
    report = Report(out=answers.fileno())
    setting = _setting(options, started)
    faulthandler.dump_traceback_later(options.deadline + 2, exit=True)
    timer = threading.Timer(
        setting.left, lambda: report.end(f"hung: {report.doing}, for {options.deadline:g} s in all")
    )
    timer.daemon = True
    timer.start()
    try:
        _alone(setting, report)
        _together(setting, report)
    except Exception as error:  # noqa: BLE001 - torch and drivers may raise anything: it is the verdict
        report.end(f"{report.doing}: {_said(error)}")
    report.end("")


def _alone(setting: Setting, report: Report) -> None:
    """The matmul; those that it was to be tested with hear of it if it fails."""
    report.doing = "importing torch"
    # We give up ourselves: else who only lost its peer dies of that, and is accused, whatever the job has set.
    env.process_environment()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    from elastic.agent.probes import matmul

    try:
        report.doing = "opening the device"
        device = matmul.use(setting.torch)
        if setting.device == "cpu":
            report.doing = "opening the network"
            _group_of_one()
        report.doing = "matmul"
        report.figures["matmul_s"] = matmul.measure(device, "quick")["median_s"]
    except Exception as error:  # noqa: BLE001 - as in main
        report.doing = f"{report.doing}: {_said(error)}"  # should the deadline come meanwhile
        telling = [
            threading.Thread(target=_tell, args=(setting, number), daemon=True)
            for number, _ in setting.mine
        ]
        for thread in telling:
            thread.start()
        until = time.monotonic() + _TELL
        for thread in telling:
            thread.join(max(until - time.monotonic(), 0.0))
        report.end(report.doing)


def _tell(setting: Setting, number: int) -> None:
    """That this one failed by itself."""
    with contextlib.suppress(Exception):
        _connect(setting, number, _TELL).set(_here(number, setting.rank), _FAILED)


def _here(number: int, rank: int) -> str:
    """The key of a process that comes to a pair, for better or worse."""
    return f"here/{number}/{rank}"


def _together(setting: Setting, report: Report) -> None:
    """All pairs that this node is in, each for as long as it may take at most."""
    report.alone = False
    mine = setting.mine
    busiest = max(
        sum(node in pair for pair in setting.pairs) for pair in setting.pairs for node in pair
    )
    slot = max(setting.left - _MARGIN, 0.1) / (busiest + 1)
    for done, (number, pair) in enumerate(mine):
        other = pair[0] if pair[1] == setting.node else pair[1]
        report.doing = f"allgather with node {other}"
        latest = setting.deadline - _MARGIN - slot * (len(mine) - done)
        report.pairs.append({"with": other, **_pair(setting, number, pair, slot, latest)})


def _pair(
    setting: Setting, number: int, pair: tuple[int, int], slot: float, latest: float
) -> dict[str, Any]:
    """latest: when it has to begin, on the monotonic clock."""
    store = _reached(setting, number)
    if isinstance(store, str):
        return {"outcome": "failed", "what": store}
    ranks = setting.ranks(pair)
    failed = f"failed/{number}"
    try:
        store.set(_here(number, setting.rank), _FINE)
        for rank in ranks:
            here = _here(number, rank)
            store.wait([here], timedelta(seconds=max(latest - time.monotonic(), 0.01)))
            if store.get(here) != _FINE.encode():
                return {"outcome": "not tested", "what": "the other one failed alone"}
    except RuntimeError as error:  # which all of torch's errors are
        with contextlib.suppress(RuntimeError):
            store.set(failed, "")
        return {"outcome": "timed out", "what": f"no word of it through the store: {_said(error)}"}
    found = _bounded(
        lambda give_up: _gathers(setting, number, ranks, slot, give_up),
        slot,
        lambda: _there(store, failed),
    )
    if found["outcome"] != "passed":
        with contextlib.suppress(RuntimeError):
            store.set(failed, "")
    return found


def _reached(setting: Setting, number: int) -> "Store | str":
    """The store at which a pair meets, or why there is no way to it. torch takes longer than it is told to where nothing
    answers."""
    seconds = max(min(setting.left - _MARGIN, _REACH), 0.1)
    found: list[Store | str] = []

    def reach() -> None:
        try:
            found.append(_connect(setting, number, seconds))
        except RuntimeError as error:
            found.append(_said(error))

    thread = threading.Thread(target=reach, daemon=True)
    thread.start()
    thread.join(seconds)
    store = found[0] if found else f"nothing answers, for {seconds:.0f} s"
    host, port = setting.stores[number]
    return f"no way to the store at {host}:{port}: {store}" if isinstance(store, str) else store


def _there(store: "Store", key: str) -> bool:
    """Also where the store is gone."""
    try:
        return store.check([key])
    except RuntimeError:
        return True


def _bounded(
    work: Callable[[list[Callable[[], object]]], dict[str, Any]],
    seconds: float,
    hopeless: Callable[[], bool],
) -> dict[str, Any]:
    """What `work` returns; it is left behind where it takes longer, or nothing can come of it any more, and what it
    put on its list called."""
    found: list[dict[str, Any]] = []
    give_up: list[Callable[[], object]] = []

    def run() -> None:
        try:
            found.append(work(give_up))
        except Mismatch as error:
            found.append({"outcome": "failed", "what": str(error)})
        except Exception as error:  # noqa: BLE001 - as above
            late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            outcome = "timed out" if late else "failed"
            found.append({"outcome": outcome, "what": _said(error)})

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    began = time.monotonic()
    while thread.is_alive() and time.monotonic() - began < seconds and not hopeless():
        thread.join(_LOOK)
    thread.join(_LAST_WORD)
    if found:
        return found[0]
    for call in give_up:
        aborting = threading.Thread(target=call, daemon=True)
        aborting.start()
        aborting.join(1)
    took = time.monotonic() - began
    return {"outcome": "timed out", "what": f"no allgather within {took:.1f} s"}


def _gathers(
    setting: Setting,
    number: int,
    ranks: list[int],
    seconds: float,
    give_up: list[Callable[[], object]],
) -> dict[str, Any]:
    """Seconds of an allgather, the median of some; GB/s are bytes from the other node for each process."""
    import torch

    from elastic.agent.probes import matmul

    device = matmul.use(setting.torch)  # a thread's own
    group = _group(setting, number, ranks, seconds)
    if setting.device == "cuda":
        give_up.append(group.abort)
    count = int(setting.mib * (1 << 20)) // 4
    sent = torch.full((count,), float(setting.rank + 1), device=device)
    got = torch.empty(count * len(ranks), device=device)
    right = torch.tensor([float(rank + 1) for rank in ranks], device=device)
    took: list[float] = []
    for _ in range(_GATHERS + 1):
        _finish(setting.device)
        start = time.perf_counter()
        group.allgather([list(got.chunk(len(ranks)))], [sent]).wait()
        _finish(setting.device)
        took.append(time.perf_counter() - start)
    if not bool((got.view(len(ranks), count) == right[:, None]).all()):
        raise Mismatch("what was gathered is not what was sent")
    median = statistics.median(took[1:])  # the first one connects
    rate = count * 4 * setting.per_node / median / 1e9
    return {"outcome": "passed", "what": "", "gather_s": median, "gb_s": rate}


def _group(setting: Setting, number: int, ranks: list[int], seconds: float) -> Any:
    """A backend of its own, as one that has failed is of no use to the next pair; torch's stubs do not
    know its collectives."""
    from torch import distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    store = PrefixStore(f"pair/{number}", _connect(setting, number, seconds))
    rank = ranks.index(setting.rank)
    if setting.device == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=10 * seconds + 60)  # we give up before
        return dist.ProcessGroupNCCL(store, rank, len(ranks), options)
    return dist.ProcessGroupGloo(store, rank, len(ranks), timedelta(seconds=seconds))


def _group_of_one() -> None:
    """Raises RuntimeError where this node has not the interface that Gloo is to use: no other is accused of that."""
    from torch import distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10))


def _connect(setting: Setting, number: int, seconds: float) -> "Store":
    """To the store at which a pair meets."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    host, port = setting.stores[number]
    timeout = timedelta(seconds=seconds)
    store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(setting.prefix, store)


def _finish(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _said(error: BaseException) -> str:
    """One line of it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _setting(options: argparse.Namespace, started: float) -> Setting:
    stores = [store.rpartition(":") for store in options.stores.split(",")]
    pairs = [tuple(map(int, pair.split("-"))) for pair in options.pairs.split(",")]
    nodes = options.world // options.per_node
    if len(stores) != len(pairs):
        raise SystemExit(f"elastic: {len(stores)} stores are not those of {len(pairs)} pairs")
    if any(len(pair) != 2 or pair[0] == pair[1] or max(pair) >= nodes for pair in pairs):
        raise SystemExit(f"elastic: --pairs {options.pairs} are not pairs of {nodes} nodes")
    return Setting(
        stores=tuple((host.strip("[]"), int(port)) for host, _, port in stores),
        prefix=options.prefix,
        rank=options.rank,
        world=options.world,
        per_node=options.per_node,
        device=options.device,
        pairs=tuple((pair[0], pair[1]) for pair in pairs),
        mib=options.mib or _MIB[options.device],
        deadline=started + options.deadline,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m elastic.agent.probes.pair")
    parser.add_argument(
        "--stores", required=True, metavar="HOST:PORT,...", help="at which each pair meets"
    )
    parser.add_argument("--prefix", default="pairs", help="of what is kept in it")
    parser.add_argument("--parent", type=int, metavar="PID", help="that this is not to outlive")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True, help="processes on all nodes")
    parser.add_argument("--per-node", type=int, default=1, help="processes on one")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--deadline", type=float, required=True, help="seconds from now")
    parser.add_argument("--pairs", default="0-1", help="of nodes, by their numbers in the group")
    parser.add_argument("--mib", type=float, default=0.0, help="sent by each process")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
