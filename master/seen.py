"""What looks at one rank show: what it has issued, whether it waits for others, goes on, works or is held. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.master.activity import Activity, Doing, OnDevice, moved, worked
from elastic.master.events import NodeId
from elastic.master.tree import Call, bare
from elastic.proto import collectives

ENOUGH = 3
"""Looks that tell that a rank works in Python alone."""
STARVED = 0.5
"""Of the time: a rank that waits for a processor for more of it is held up by whoever has that."""
RARE = re.compile(
    r"_*(eval|valid|test|predict|generat|infer|save|checkpoint|upload|download)", re.IGNORECASE
)
"""Beginnings of functions' names of a script that does something besides training."""
MODULE = "/torch/nn/modules/module.py"
"""Calls a model and each of its layers."""
MUCH = 1 << 20
"""Bytes: fewer are read and written by whoever looks, too, and by what watches a machine."""
SILENT = frozenset({Activity.WAIT, Activity.BACKWARD, Activity.OPTIMIZER})
"""May wait for others in a library's code, of which no stack tells, asleep."""
LIBRARY = frozenset({Activity.BACKWARD, Activity.OPTIMIZER})
"""Of these, those in whose own code a rank sleeps for others alone: it waits also where it does not say for what."""
SPINS = frozenset({Activity.DEVICE, Activity.NATIVE})
"""The same, of a device, which the processor may wait for awake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The last that a rank has issued in one process group; on a device the first that is not over."""

    group: str
    seq: int
    op: str
    sizes: str
    p2p: bool = False
    """A send or a receive; other ranks count theirs otherwise."""
    device: bool = False
    """On which it runs; its host may do other things meanwhile."""
    started: bool = False
    """On the device, where that is known."""
    done: bool
    before: str = ""
    """What its group had before it, as `kind` tells that; empty where it is not known."""
    members: range = range(0)
    """Its group's ranks; none where they are not known."""

    @property
    def known(self) -> bool:
        """Else it is one of a device's that its rank does not remember."""
        return bool(self.op)

    @property
    def kind(self) -> str:
        return collectives.kind(self.op, self.sizes)

    def __str__(self) -> str:
        if not self.known:
            return "a collective"
        return f"{self.op.rpartition(':')[2]} #{self.seq} of {self.sizes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rank in one look."""

    rank: int
    node: NodeId
    state: str
    """Of its main thread, as /proc has it: R, S, D, T, Z; empty: gone."""
    doing: Doing
    stack: tuple[Call, ...] = ()
    """Innermost first."""
    collectives: tuple[Collective, ...] | None = None
    """None: it did not answer what they are."""
    at: float = 0.0
    """When it was told, in job time."""
    sure: bool = True
    """It is known whether its main thread holds the GIL, or runs in a library without it."""
    free: bool = False
    """Its main thread is known not to hold the GIL, and is in a library's code."""
    ticks: int = 0
    cpu: float = 0.0
    """Seconds of it that its main thread used."""
    io: int = 0
    """Bytes that its process has read and written, or moved over TCP."""
    helpers_cpu: float = 0.0
    """Seconds of it that the processes used that it began, and those that these began."""
    helpers_io: int = 0
    """Bytes, as `io` has them, of theirs."""
    run_delay: float | None = None
    """Seconds that its main thread waited for it, in all its life; None: not known."""
    taken: float = 0.0
    """When it was taken, by its node's clock."""
    on_device: OnDevice = OnDevice.UNKNOWN
    transfers: Mapping[int, tuple[int, int]] | None = None
    """By rank, how often it has sent to it, and asked to receive from it; None: it did not answer, or does not know."""
    kernel: tuple[str, ...] = ()
    """Of a rank in state D: the kernel's functions, innermost first."""

    @property
    def pending(self) -> tuple[Collective, ...]:
        """What it has issued, and what is not known to be over."""
        return tuple(one for one in self.collectives or () if not one.done)

    @property
    def waits(self) -> bool:
        """Other ranks hold it up."""
        doing = self.doing
        if doing.activity is Activity.DEBUGGER:
            return False
        if any(one.device for one in self.pending):
            return True  # its host may wait for it in any line: `loss.item()`
        silent = (doing.activity in SILENT and doing.asleep) or doing.activity in SPINS
        unsaid = (
            self.collectives is None and self.free and doing.asleep and doing.activity in LIBRARY
        )
        return doing.waits_for_others or unsaid or (silent and bool(self.pending))

    @property
    def may_wait(self) -> bool:
        """For a thread of its own that is in a collective, or by asking now and then whether one is over."""
        own = self.doing.asleep and self.doing.activity in (Activity.LOCK, Activity.SLEEP)
        return own and bool(self.pending)

    @property
    def place(self) -> str:
        """The innermost call of the script, in words; without its line, for a loop runs through several."""
        if self.doing.call is None:
            return ""
        function, file, _ = self.doing.call
        return f"{file} in {function}"


def newest(looks: tuple[Seen, ...]) -> Seen:
    """The last look; what it has issued as it told before, where it did not answer now and has not moved since."""
    last = looks[-1]
    told = next((look for look in reversed(looks) if look.collectives is not None), last)
    if told is last or has_moved((told, last)):
        return last
    return replace(last, collectives=told.collectives, transfers=told.transfers)


def goes_on(before: Seen, after: Seen) -> bool:
    """It does something else, or works at it. Who waits for others works at nothing, even if it waits awake."""
    if after.state == "T":
        return False
    if has_moved((before, after)):
        return True
    if before.stack and after.stack and before.doing.activity is not after.doing.activity:
        return True
    return not after.waits and has_worked((before, after))


def had(looks: tuple[Seen, ...], quiet: float) -> float:
    """Of the seconds since the round moved those that a rank had: where others have the processor most of the time, as these
    looks tell, it cannot be done as soon."""
    first, last = looks[0], looks[-1]
    if first.run_delay is None or last.run_delay is None:
        return quiet
    waited = (last.run_delay - first.run_delay) / max(last.taken - first.taken, 1e-3)
    return quiet if waited < STARVED else quiet * (1 - min(waited, 1.0))


def is_rare(stack: Sequence[Call]) -> bool:
    """Not what a model calls, nor torch: what saves memory is a checkpoint there."""
    layers = [at for at, (_, file, _) in enumerate(stack) if file.endswith(MODULE)]
    callers = stack[max(layers, default=-1) + 1 :]
    return any(RARE.match(bare(name)) for name, file, _ in callers if "/torch/" not in file)


def has_moved(looks: tuple[Seen, ...]) -> bool:
    """Between any two looks: another step, other functions, or another collective."""
    first = looks[0]
    for look in looks[1:]:
        both = look.collectives is not None and first.collectives is not None
        if look.ticks != first.ticks or (both and _issued(look) != _issued(first)):
            return True
        if look.stack and first.stack and moved(first.stack, look.stack):
            return True
    return False


def _issued(seen: Seen) -> tuple[object, object]:
    """Another thread may go on with transfers while the main one does not."""
    return seen.collectives, seen.transfers if seen.waits else None


def held(looks: tuple[Seen, ...]) -> bool:
    """By the kernel, for something that does not come: it does no work in between."""
    return all(look.state == "D" and look.stack for look in looks) and not has_worked(looks)


def has_worked(looks: tuple[Seen, ...]) -> bool:
    """Its main thread used the processor between the first look and the last, or one of its threads moved bytes, as where
    it waits for those that write or upload a checkpoint."""
    first, last = looks[0], looks[-1]
    moved_bytes = last.io - first.io > MUCH
    return moved_bytes or worked(first.cpu, last.cpu, seconds=last.at - first.at)


def has_help(looks: tuple[Seen, ...]) -> bool:
    """The same of the processes that it began: an upload's, a compiler's that waits for a disk."""
    first, last = looks[0], looks[-1]
    moved_bytes = last.helpers_io - first.helpers_io > MUCH
    return moved_bytes or worked(first.helpers_cpu, last.helpers_cpu, seconds=last.at - first.at)


def in_python(looks: tuple[Seen, ...]) -> bool:
    """In its own code at each of the last looks: a few may all find what calls a library again and again between two."""
    plain = [look.sure and look.doing.activity is Activity.PYTHON for look in looks[-ENOUGH:]]
    return all(plain) and len(plain) == ENOUGH


def endless(looks: tuple[Seen, ...]) -> bool:
    """A kernel on its device does not end, which no collective is, and its host waits for it or is about to. What the
    device had at the first of these looks is not done: else it goes on, however slowly."""
    held = looks[-1].on_device is OnDevice.HELD and not looks[-1].waits
    return held and all(one.on_device in (OnDevice.HELD, OnDevice.UNKNOWN) for one in looks[1:])


def lost_worker(looks: tuple[Seen, ...]) -> bool:
    """Its loader waits for a process that was there and is gone, or is stopped, or held by the kernel: the same one, which
    has not run in between. (One that has come to the end of its data stays a zombie, and is not waited for.)"""
    first, last = looks[0].doing.workers, looks[-1].doing.workers
    if not at_loader(looks[-1]):
        return False
    if len(last) < len(first) or any(one.state == "T" or one.failed for one in last):
        return True
    held = [
        {(one.pid, one.switches) for one in look.doing.workers if one.state == "D"}
        for look in looks
    ]
    return bool(set.intersection(*held))


def at_loader(seen: Seen) -> bool:
    """It waits for what a worker makes."""
    return seen.doing.activity is Activity.DATA and seen.doing.name == "_try_get_data"
