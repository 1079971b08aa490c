"""Which worker pods there should be: who is missing, who goes, who only waits. Pure.

Pods are alike: a slot is a number in a name, and a place among the ranks is the master's to give. There
are as many pods as the world's size and the hot spares together; who finds no place there is a spare. A
replacement has the slot of the one before, the next attempt, and so a name of its own: nothing waits for
a pod that is stuck in its end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.k8s import causes
from elastic.k8s.causes import Action, Cause, Held, Rule, Verdict
from elastic.k8s.observed import Pod
from elastic.proto.elasticjob import Past
from elastic.proto.ending import Ended

HOPELESS = 300.0
"""Seconds, at least, until a job fails for an image that nobody may have: somebody may put it right."""
EARLY, LONGEST = 10.0, 300.0
"""Seconds before a slot's next pod, once TRIES in a row have ended before their agent was there; each time twice as
many, up to the second: others may train on all the while, and each new pod costs its node and the server."""
TRIES = 3
OTHERS = 600.0
"""Seconds after a pod has ended with exit code 0 in which the job is to end, where too few are left to train."""


_BY_OTHERS = (Cause.COMPLETED, Cause.DELETED, Cause.PREEMPTED, Cause.EVICTED, Cause.NODE_LOST)
"""An end that the pod has not brought about itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the spec says of the workers."""

    replicas: int
    least: int
    """`elastic.min`."""
    unit: int = 1
    sizes: tuple[int, ...] = ()
    """`elastic.discreteSizes`; empty: every multiple of the unit."""
    spares: int = 0
    pending_timeout: float = 900.0
    pending: str = "ShrinkToMin"
    """What happens then: ShrinkToMin, Wait or Fail."""
    cooldown: float = 300.0
    """Seconds from a shrink until the world grows again."""
    drain: float = 180.0
    """Seconds that a victim has to leave before its pod is deleted."""
    refusal: float = 30.0
    """Seconds for which the server may take no more pods until the job goes on without them: a quota counts
    those that are ending, too."""
    image: float = 300.0
    """Seconds for which a container that cannot start is waited for, where that may pass."""
    hopeless: float = HOPELESS
    """Where it does not: until the job fails, if it cannot do without."""
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The cluster, and what the master knows of the pods' agents."""

    pods: tuple[Pod, ...] = ()
    ended: tuple[Pod, ...] = ()
    """Those that have ended since the last look, as they were then: one may have come since, and be gone by now."""
    missed: frozenset[str] = frozenset()
    """Names of pods that were made and are not in a list that was begun later: no watch has shown them, or will."""
    attached: frozenset[str] = frozenset()
    """Names of pods whose agent is there."""
    lost: frozenset[str] = frozenset()
    """Of pods whose agent the master has given up, whatever the cluster says of them."""
    slow: frozenset[str] = frozenset()
    step: int = 0
    """The job's last."""
    refused: str = ""
    """Why the server takes no more pods (a quota, an admission), in its words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the pods alone do not tell. A launcher that starts anew has the attempts of it, by the names that
    the master's journal knows."""

    pasts: Mapping[int, Past] = field(default_factory=dict[int, Past])
    """By slot."""
    attempts: Mapping[int, int] = field(default_factory=dict[int, int])
    """By slot: the next one."""
    known: Mapping[str, Pod] = field(default_factory=dict[str, Pod])
    """By name: those whose end is still to be judged."""
    judged: frozenset[str] = frozenset()
    """Names of those that are there and were."""
    made: Mapping[str, int] = field(default_factory=dict[str, int])
    """By name: slots of pods that no watch has shown yet. However long that takes: they are there."""
    came: frozenset[str] = frozenset()
    """Names of those whose agent was there."""
    early: Mapping[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    """By slot: how many pods in a row ended before their agent was there, and when the last one did."""
    done: frozenset[int] = frozenset()
    """Slots whose pod has ended with exit code 0."""
    few: float | None = None
    """Since when too few others are left to train."""
    leaving: Mapping[str, float] = field(default_factory=dict[str, float])
    """By name: when a victim was asked to leave."""
    stuck: Mapping[str, float] = field(default_factory=dict[str, float])
    """By name: since when a pod cannot be placed, or its container not be started."""
    refused: float | None = None
    """Since when the server takes no more pods."""
    limit: int | None = None
    """What the world was shrunk to."""
    limited: float = 0.0
    """When."""
    closed: bool = False
    """Pods beyond that are not asked for, until the world may grow again: a part of a unit had come and
    only held its nodes."""
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    slot: int
    attempt: int

    def pod(self, job: str) -> str:
        """Its name."""
        return f"{job}-worker-{self.slot}-r{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    memory: Memory
    create: tuple[New, ...] = ()
    delete: tuple[tuple[str, str], ...] = ()
    """Names, each with the reason."""
    withdraw: tuple[tuple[str, str], ...] = ()
    """To drain first, all in one change."""
    ended: tuple[tuple[Pod, Verdict], ...] = ()
    """What is new about pods that are over or gone."""
    size: int = 0
    """The largest world that may be now."""
    desired: int = 0
    """Pods without spares."""
    ready: int = 0
    waiting: int = 0
    """Ready, and beyond what a legal world of them takes."""
    spares: int = 0
    pending: tuple[tuple[str, str], ...] = ()
    """Names of pods that cannot start, each with the reason."""
    fail: tuple[str, str] | None = None
    """The job cannot go on: a `Cause` or a word for why, and the reason."""
    restart: str = ""
    """Why all ranks are to start again."""
    until: float | None = None
    """When to look again, if nothing happens."""


def legal(count: int, wanted: Wanted) -> int:
    """The largest legal world of at most that many pods; 0: there is none."""
    if wanted.sizes:
        return max((s for s in wanted.sizes if wanted.least <= s <= count), default=0)
    size = count // wanted.unit * wanted.unit
    return size if size >= wanted.least else 0


def plan(
    wanted: Wanted, seen: Seen, memory: Memory, now: float, name: Callable[[New], str]
) -> Plan:
    """name: of a new pod."""
    memory, ended = _judge(wanted, seen, memory, now)
    live = tuple(p for p in seen.pods if p.alive and p.name not in seen.lost)
    stuck = _stuck(live, memory, now)
    since = now if memory.refused is None else memory.refused
    memory = replace(
        memory,
        stuck={n: since for n, (since, _) in stuck.items()},
        refused=since if seen.refused else None,
    )
    stay = [p for p in live if p.name not in memory.leaving]
    ready = [p for p in stay if p.name in seen.attached]
    coming = sum(p.name not in stuck for p in stay) + len(memory.made)
    memory = _limit(wanted, stuck, len(ready), coming, memory, now, ended)
    full = legal(wanted.replicas, wanted)
    size = full if memory.limit is None else min(full, memory.limit)
    target = (size if memory.closed else full) + wanted.spares
    victims = _victims(live, seen, target, stuck)
    memory, withdraw, delete = _take(wanted, victims, seen, memory, now)
    # A victim may be among what remains.
    delete = tuple(dict((*_remains(wanted, seen, live, ended), *delete)).items())
    few = memory.done and not legal(target - len(memory.done), wanted)
    memory = replace(memory, few=(memory.few or now) if few else None)
    fail = _fail(wanted, ended, stuck, seen, memory, live, target, len(ready), now)
    create = () if fail is not None else _missing(live, victims, memory, target, now)
    attempts = {**memory.attempts, **{new.slot: new.attempt + 1 for new in create}}
    made = {**memory.made, **{name(new): new.slot for new in create}}
    memory = replace(memory, attempts=attempts, made=made)
    world = legal(min(len(ready), size), wanted)
    beyond = len(ready) - world
    return Plan(
        memory=memory,
        create=create,
        delete=delete,
        withdraw=withdraw,
        ended=ended,
        size=size,
        desired=full,
        ready=len(ready),
        waiting=max(0, beyond - wanted.spares),
        spares=min(beyond, wanted.spares),
        pending=tuple((n, held.why) for n, (_, held) in stuck.items()),
        fail=fail,
        restart=next((v.reason for _, v in ended if v.action is Action.RESTART_JOB), ""),
        until=_until(wanted, stuck, memory, now),
    )


def refused(memory: Memory, news: Iterable[New], *, taken: bool = False) -> Memory:
    """Pods that were not made; taken: since another object has the name, which is not tried again."""
    attempts, gone = dict(memory.attempts), set[int]()
    for new in news:
        attempts[new.slot] = new.attempt + taken
        gone.add(new.slot)
    made = {name: slot for name, slot in memory.made.items() if slot not in gone}
    return replace(memory, attempts=attempts, made=made)


def taken_away(plan: Plan, nodes: frozenset[str]) -> list[tuple[str, Verdict]]:
    """Ends of pods that are among the master's nodes no more: if it heard of the agent's end first, it took the node for
    lost. What costs nothing it excuses, and `elasticctl why` tells how containers ended."""
    return [
        (pod.name, verdict)
        for pod, verdict in plan.ended
        if pod.name not in nodes and verdict.cause not in (Cause.NODE_LOST, Cause.COMPLETED)
    ]


# --- what has happened ---------------------------------------------------------------------------


def _judge(
    wanted: Wanted, seen: Seen, memory: Memory, now: float
) -> tuple[Memory, tuple[tuple[Pod, Verdict], ...]]:
    """Each end once; of a victim that has left as it was asked to, none."""
    here = {pod.name: pod for pod in seen.pods}
    pasts = dict(memory.pasts)
    if seen.step > memory.step:
        pasts = {slot: causes.progressed(past) for slot, past in pasts.items()}
    found: list[tuple[Pod, Verdict]] = []
    judged, done = memory.judged & here.keys(), set(memory.done)
    came, early = memory.came | seen.attached, dict(memory.early)
    ends = {pod.name: pod for pod in seen.ended if pod.name not in memory.judged}
    gone = [pod for n, pod in {**memory.known, **ends}.items() if n not in here]
    over = [p for p in seen.pods if p.name not in judged and (not p.alive or p.name in seen.lost)]
    for pod in (*over, *gone):
        judged |= {pod.name} & here.keys()
        if pod.name in memory.leaving:
            continue
        past = pasts.get(pod.slot, Past())
        if pod.alive and pod.name in here:
            verdict = Verdict(
                cause=Cause.NODE_LOST,
                action=Action.REPLACE_ELSEWHERE,
                counts=False,
                reason=f"{pod.name}: nothing is heard of it",
            )
        else:
            verdict = causes.judge(
                pod, past, wanted.rules, step=seen.step, gone=pod.name not in here
            )
        pasts[pod.slot] = causes.remember(past, pod, verdict, seen.step)
        if pod.name not in came and verdict.cause not in _BY_OTHERS:
            early[pod.slot] = early.get(pod.slot, (0, 0.0))[0] + 1, now
        if verdict.action is Action.IGNORE and verdict.cause is Cause.COMPLETED:
            done.add(pod.slot)
        found.append((pod, verdict))
    attempts = dict(memory.attempts)
    for pod in (*seen.pods, *seen.ended):
        attempts[pod.slot] = max(attempts.get(pod.slot, 0), pod.attempt + 1)
    memory = replace(
        memory,
        pasts=pasts,
        attempts=attempts,
        judged=frozenset(judged),
        known={n: p for n, p in here.items() if n not in judged},
        made={
            n: slot
            for n, slot in memory.made.items()
            if n not in here and n not in ends and n not in seen.missed
        },
        leaving={n: at for n, at in memory.leaving.items() if n in here},
        came=came & here.keys(),
        early={
            s: e
            for s, e in early.items()
            if s not in {p.slot for p in seen.pods if p.name in seen.attached}
        },
        done=frozenset(done),
        step=max(seen.step, memory.step),
    )
    return memory, tuple(found)


def _pauses(memory: Memory) -> Mapping[int, float]:
    """By slot: until when it gets no pod."""
    return {
        slot: at + min(LONGEST, EARLY * 2.0 ** min(row - TRIES, 16))
        for slot, (row, at) in memory.early.items()
        if row >= TRIES
    }


Stuck = Mapping[str, tuple[float, Held]]
"""By name: since when, and why."""


def _stuck(live: Sequence[Pod], memory: Memory, now: float) -> Stuck:
    found = ((pod.name, causes.held_up(pod)) for pod in live)
    return {name: (memory.stuck.get(name, now), held) for name, held in found if held is not None}


def _patience(held: Held, wanted: Wanted) -> float:
    """Seconds until the job goes on without that pod."""
    if held.hopeless:
        return 0.0
    return wanted.image if held.image else wanted.pending_timeout


def _limit(
    wanted: Wanted,
    stuck: Stuck,
    ready: int,
    coming: int,
    memory: Memory,
    now: float,
    ended: Sequence[tuple[Pod, Verdict]],
) -> Memory:
    """Shrink to what is here once the rest stays away; grow once it has come, after the cooldown.

    coming: those that are ready, or may soon be.
    """
    full = legal(wanted.replicas, wanted)
    now_legal = legal(min(ready, full), wanted)
    if memory.limit is None:
        shrink = any(verdict.action is Action.SHRINK for _, verdict in ended)
        if wanted.pending == "ShrinkToMin":
            shrink |= memory.refused is not None and now >= memory.refused + wanted.refusal
            shrink |= any(
                now >= since + _patience(held, wanted) and (now_legal or not held.hopeless)
                for since, held in stuck.values()
            )
        size = legal(min(coming, full), wanted)
        if shrink and 0 < size < full:
            surplus = coming - size > wanted.spares
            return replace(memory, limit=size, limited=now, closed=surplus)
        return memory
    cool = now >= memory.limited + wanted.cooldown
    if memory.limit >= full or (cool and (memory.closed or now_legal > memory.limit)):
        asked = None if memory.refused is None else now  # it is to be asked for first
        return replace(memory, limit=None, limited=now, closed=False, refused=asked)
    return memory


# --- what is to be done --------------------------------------------------------------------------


def _victims(live: Sequence[Pod], seen: Seen, target: int, stuck: Stuck) -> tuple[Pod, ...]:
    """Unhealthy ones first, then slow ones, then the highest slots."""

    def rank(pod: Pod) -> tuple[bool, bool, bool, int]:
        return (pod.name in stuck, pod.name not in seen.attached, pod.name in seen.slow, pod.slot)

    return tuple(sorted(live, key=rank, reverse=True)[: max(0, len(live) - target)])


def _take(
    wanted: Wanted, victims: Sequence[Pod], seen: Seen, memory: Memory, now: float
) -> tuple[Memory, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Who has an agent is asked to leave; the others, who has left, and who does not leave in time, are deleted."""
    reason = f"{legal(wanted.replicas, wanted)} worker pods are wanted"
    leaving = dict(memory.leaving)
    withdraw, delete = [], []
    for pod in victims:
        since = leaving.setdefault(pod.name, now)
        if pod.name not in seen.attached or now >= since + wanted.drain:
            delete.append((pod.name, reason))
        elif pod.name not in memory.leaving:
            withdraw.append((pod.name, reason))
    late = [
        pod.name
        for pod in seen.pods
        if not pod.deleting
        and pod.name in memory.leaving
        and (pod.over or pod.name not in seen.attached or now >= leaving[pod.name] + wanted.drain)
        and pod.name not in dict(delete)
    ]
    delete += [(name, reason) for name in late]
    return replace(memory, leaving=leaving), tuple(withdraw), tuple(delete)


def _remains(
    wanted: Wanted, seen: Seen, live: Sequence[Pod], ended: Sequence[tuple[Pod, Verdict]]
) -> tuple[tuple[str, str], ...]:
    """What the master has lost though it seems to run, whose unit starts again, all but a slot's last end, and what
    has failed while a sidecar of it holds its devices; one that ended well is there to tell so."""
    newest: dict[int, int] = {}
    for pod in seen.pods:
        newest[pod.slot] = max(newest.get(pod.slot, 0), pod.attempt)
    units = {p.slot // wanted.unit for p, v in ended if v.action is Action.RESTART_UNIT}
    gone = [(p.name, "its agent is lost") for p in seen.pods if p.name in seen.lost and p.alive]
    old = [
        (p.name, "other pods have had its slot since")
        for p in seen.pods
        if p.over and not p.deleting and p.attempt < newest[p.slot] - 1
    ]
    held = [
        (p.name, "its main container has ended, and another one runs on")
        for p in seen.pods
        if p.exit_code and p.phase == "Running" and not p.deleting and p.name not in dict(old)
    ]
    mates = [(p.name, "its unit starts again") for p in live if p.slot // wanted.unit in units]
    return (*gone, *old, *held, *mates)


def _missing(
    live: Sequence[Pod],
    victims: Sequence[Pod],
    memory: Memory,
    target: int,
    now: float,
) -> tuple[New, ...]:
    """In the lowest slots that are free."""
    stay = {pod.name for pod in live} - {pod.name for pod in victims} - memory.leaving.keys()
    taken = {pod.slot for pod in live if pod.name in stay}
    taken |= {*memory.made.values()} | memory.done
    taken |= {slot for slot, until in _pauses(memory).items() if now < until and slot < target}
    leaving = {pod.slot for pod in live} - taken
    count = target - len(taken)
    free = [slot for slot in range(target + len(leaving)) if slot not in taken | leaving]
    return tuple(
        New(slot=slot, attempt=memory.attempts.get(slot, 0)) for slot in free[: max(0, count)]
    )


def _fail(
    wanted: Wanted,
    ended: Sequence[tuple[Pod, Verdict]],
    stuck: Stuck,
    seen: Seen,
    memory: Memory,
    live: Sequence[Pod],
    target: int,
    ready: int,
    now: float,
) -> tuple[str, str] | None:
    for _, verdict in ended:
        if verdict.action is Action.FAIL:
            return str(verdict.cause), verdict.reason
    for since, held in stuck.values():
        if held.hopeless and ready < wanted.least and now >= since + wanted.hopeless:
            return str(Cause.IMAGE), held.why
        if wanted.pending == "Fail" and now >= since + wanted.pending_timeout:
            return str(Cause.IMAGE if held.image else Ended.UNSCHEDULABLE), held.why
    denied = memory.refused is not None and now >= memory.refused + wanted.pending_timeout
    if denied and wanted.pending == "Fail":
        return str(Ended.QUOTA), seen.refused
    none = not live and not memory.made and len(memory.done) >= target > 0
    if none or (memory.few is not None and now >= memory.few + OTHERS):
        count = len(memory.done)
        pods = "the worker pod" if target == 1 else f"{count} of {target} worker pods"
        ends = "ends" if count == 1 else "end"
        return str(Cause.USER_ERROR), (
            f"{pods} {ends} with exit code 0 before the job is over: does their command start elastic-run?"
        )
    return None


def _until(wanted: Wanted, stuck: Stuck, memory: Memory, now: float) -> float | None:
    times = [
        *(since + wanted.pending_timeout for since, _ in stuck.values()),
        *(since + wanted.image for since, _ in stuck.values()),
        *(since + wanted.hopeless for since, _ in stuck.values()),
        *(at + wanted.drain for at in memory.leaving.values()),
        *_pauses(memory).values(),
    ]
    if memory.refused is not None:
        times += (memory.refused + wanted.refusal, memory.refused + wanted.pending_timeout)
    if memory.limit is not None:
        times.append(memory.limited + wanted.cooldown)
    if memory.few is not None:
        times.append(memory.few + OTHERS)
    return min((t for t in times if t > now), default=None)
