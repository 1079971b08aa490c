"""A job as the master holds it, and the few ways in which a round or the job ends. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastic.master import events as ev
from elastic.master import ledger as books
from elastic.master import nodes as registry
from elastic.master import prechecks
from elastic.master import recovery as medic
from elastic.master.events import Damage, Effect, Incarnation, NodeId, Straggling
from elastic.master.ledger import Ledger
from elastic.master.nodes import Node, NodeState
from elastic.master.policy import Policy
from elastic.master.recovery import Cause, Observed, Recovery
from elastic.master.rendezvous import Candidate, Seat, with_ranks
from elastic.master.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A planned end of a round: once its ranks wait in the save of one step, or its time is over."""

    cause: Cause
    reason: str
    until: float
    """In job time."""
    ends: bool = False
    """The job, not only the round."""
    met: bool = False
    """All ranks wait."""

    def due(self, now: float) -> bool:
        return self.met or now >= self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    number: int
    seats: tuple[Seat, ...]
    incarnations: Mapping[NodeId, Incarnation]
    roles: Mapping[NodeId, str]
    store: str
    started: float
    standing: bool = True
    """False once it ended before its time; its ranks are to be stopped."""
    finished: frozenset[NodeId] = frozenset()
    failures: tuple[Observed, ...] = ()
    ended: frozenset[int] = frozenset()
    """Ranks that ended with 0, of nodes that were not done, or were before anything failed."""
    stepped: bool = False
    """Its first step was finished."""
    advanced: bool = False
    """It went beyond the round before it, as far as the script tells."""
    step: int = 0
    """The last step finished in it, where the script tells."""
    saves: bool = False
    """Its ranks use a checkpoint."""
    change: Change | None = None
    """Why its ranks leave, while they do."""
    stragglers: tuple[Straggling, ...] = ()
    """What holds it up now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Somebody went back to older checkpoints."""

    before: int
    """What this round and those before it have saved is void, but for these."""
    moments: tuple[tuple[str, int, int], ...]
    """The checkpoint's name, round and step."""


class Why(StrEnum):
    """Why a job or a node's part in it is over, where no failure of a round is the reason."""

    JOIN_TIMEOUT = "too few nodes came"
    BELOW_MIN = "too few nodes are left"
    UNHEALTHY = "health check"
    STRAGGLER = "straggler"
    STOPPED = "stopped"
    UNSCHEDULABLE = "unschedulable"
    QUOTA = "quota exceeded"
    IMAGE = "image"
    DEADLINE = "deadline"


DRAINED = 213
"""Exit code of a launcher whose job or node was drained: not finished, and not failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    exit_code: int
    reason: str
    resumable: bool = False
    """The same command goes on from here: the job was stopped, it did not end."""
    cause: str = ""
    """Of a job that failed: a `Cause` or a `Why`, where one is known."""
    root: Observed | None = None
    """The failure that it ended with."""

    @property
    def outcome(self) -> str:
        """In a word: "succeeded", "drained", "stopped" or "failed"."""
        if self.resumable:
            return "drained" if self.exit_code == DRAINED else "stopped"
        return "succeeded" if self.exit_code == 0 else "failed"


TOLD = 600.0
"""Seconds within which a round tells of its slow ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A node that was drained since its ranks were slow."""

    node_id: NodeId
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    uid: str = ""
    epoch: int = 0
    launch: str = ""
    """Of the launcher whose master has this epoch."""
    policy: Policy | None = None
    """Of this epoch."""
    nodes: registry.Nodes = field(default_factory=dict[NodeId, Node])
    spent: registry.Spent = ()
    round: Round | None = None
    """The last one formed."""
    last_round: int = 0
    """Its number; never goes back, not even for a new job in the same directory."""
    restart_count: int = 0
    unit: int = 1
    """What the script declared its world to be a multiple of."""
    plain: bool = False
    """The script imports torch in the environment that it was given."""
    checks: prechecks.Checks = field(default_factory=dict[str, prechecks.Checked])
    """What is known of nodes by their probes."""
    probes: int = 0
    """That were asked for so far."""
    trial: Trial | None = None
    """Of nodes that are tested two by two, before they train together."""
    recovery: Recovery = field(default_factory=Recovery)
    ledger: Ledger = field(default_factory=Ledger)
    replaced: tuple[Replaced, ...] = ()
    """Nodes that were drained for being slow, the last at the end."""
    rollback: Rollback | None = None
    """The last one."""
    damaged: tuple[Damage, ...] = ()
    """What is not loaded again, the last that was found at the end."""
    below_min_since: float | None = None
    """Since when, in job time, no legal world can be had."""
    lead_since: float = 0.0
    """When the master of this epoch began, in job time: the time to join is counted from there, since
    the gap before it was measured by a clock that may have jumped."""
    stop_grace: float = 0.0
    """Seconds between SIGTERM and SIGKILL for the ranks of the round that ended last."""
    result: Result | None = None
    """Once there is one nothing changes, but by a master that starts again."""


Step = tuple[Job, tuple[Effect, ...], str]
"""What one step of a decision gives: the state, what to do about it, and why."""


def known(job: Job, node_id: NodeId, incarnation: Incarnation) -> Node | None:
    """The fence: messages of another life of the node are nobody's."""
    node = job.nodes.get(node_id)
    return node if node is not None and node.incarnation == incarnation else None


def is_stale(job: Job, node_id: NodeId, incarnation: Incarnation, number: int | None) -> bool:
    """The fences: it is of a life of the node that is over, or of another round than the last, or
    of one in which this life has no place. number: of the round that a message is about.
    """
    if known(job, node_id, incarnation) is None:
        return True
    current = job.round
    return number is not None and (
        current is None
        or number != current.number
        or current.incarnations.get(node_id) != incarnation
    )


def trained(job: Job) -> Mapping[NodeId, Incarnation]:
    """Lives of nodes that the last round was of."""
    return {} if job.round is None else job.round.incarnations


def busy(job: Job) -> Mapping[NodeId, Incarnation]:
    """The same, and of those that are being tested with one another."""
    return trained(job) if job.trial is None else {**trained(job), **job.trial.members}


def in_round(job: Job, node: Node) -> bool:
    """It has a part in the standing round that it has not finished."""
    current = job.round
    return (
        current is not None
        and current.standing
        and current.incarnations.get(node.node_id) == node.incarnation
        and node.node_id not in current.finished
    )


def ranks_on(current: Round, nodes: Collection[NodeId]) -> list[int]:
    """Of these nodes."""
    return [
        rank for seat, here in with_ranks(current.seats) if seat.node_id in nodes for rank in here
    ]


def nodes_of(current: Round, ranks: Collection[int]) -> list[NodeId]:
    """Where some of a round's ranks are, in the order of the nodes' places."""
    wanted = set(ranks)
    return [seat.node_id for seat, here in with_ranks(current.seats) if not wanted.isdisjoint(here)]


def needed(job: Job, node: Node) -> bool:
    """The standing round cannot go on without this life of it: its ranks train, or it has the
    store.
    """
    current = job.round
    if current is None or not current.standing:
        return False
    has_store = (
        current.seats[0].node_id == node.node_id
        and current.incarnations[node.node_id] == node.incarnation
    )
    return has_store or in_round(job, node)


def candidates(job: Job, policy: Policy) -> tuple[Candidate, ...]:
    """Nodes that may have a place in the next round."""
    lives = trained(job)
    return tuple(
        Candidate(
            node_id=node.node_id,
            slots=node.slots,
            since=node.joined,
            ready=node.joined + policy.preparation
            if job.plain and not node.prepared and lives.get(node.node_id) != node.incarnation
            else node.joined,
            labels=node.labels,
            node_rank=node.node_rank,
        )
        for node in job.nodes.values()
        if node.state is NodeState.ATTACHED
        and not node.draining
        and node.slots > 0
        and prechecks.may_join(node, job.checks, policy)
    )


def plan(
    job: Job, cause: Cause, reason: str, now: float, policy: Policy, *, ends: bool = False
) -> Job:
    """Have the ranks of the standing round leave at the end of a step, for a cause that costs nothing:
    in the time of a drain where they use a checkpoint, else at once. One change takes another's place,
    but no more time than that; none takes the place of the job's end.
    """
    assert job.round is not None
    current, before = job.round, job.round.change
    if before is not None and before.ends:
        return job
    until = now + (policy.drain_timeout if current.saves else 0.0)
    change = Change(
        cause=cause,
        reason=reason,
        until=until if before is None else min(until, before.until),
        ends=ends,
        met=before is not None and before.met,
    )
    return replace(job, round=replace(current, change=change))


def interrupt(
    job: Job,
    cause: Cause,
    reason: str,
    now: float,
    policy: Policy,
    root: Observed | None = None,
    lost: tuple[NodeId, ...] = (),
    *,
    repeats: bool = True,
) -> Job:
    """End the standing round for a cause that needs no judging, and charge for it. repeats: it may be the same as before."""
    if job.result is not None or job.round is None or not job.round.standing:
        return job
    rested = recovered(job, job.round, now)
    recovery, verdict = medic.charge(rested, cause, reason, root, policy, repeats=repeats)
    job = replace(job, recovery=recovery)
    if isinstance(verdict, medic.Fail):
        return fail(job, verdict, now, policy)
    return broken(job, cause, reason, now, policy, lost)


def _still_slow(job: Job, current: Round, now: float) -> tuple[Replaced, ...]:
    """Without those whose ranks are not slow any more, on others: a round that stood for so long would have told."""
    if now - current.started < TOLD:
        return job.replaced
    slow = {one.ranks for one in current.stragglers}
    return tuple(one for one in job.replaced if one.ranks in slow)


def recovered(job: Job, current: Round, now: float) -> Recovery:
    """What the round that ends now has given back."""
    untold = current.stepped and not (current.step or job.recovery.reached)
    return medic.rested(job.recovery, now - current.started, untold=untold)


def broken(
    job: Job,
    cause: Cause,
    reason: str,
    now: float,
    policy: Policy,
    lost: tuple[NodeId, ...] = (),
) -> Job:
    """The standing round is over; whoever paid for it has paid. lost: whose loss is all that is known of the cause."""
    assert job.round is not None
    grace = policy.failure_grace
    if cause in (Cause.GROWTH, Cause.REQUEST):
        grace = policy.drain_timeout
    elif cause is Cause.NODE_LEFT:
        # Who cancels a job signals all of its launchers: theirs may be on its way.
        grace = max(grace, policy.settle)
    in_doubt = {  # they trained, and can be tried only now
        key: replace(node, probe=replace(node.probe, since=now))
        for key in job.round.incarnations
        if (node := job.nodes.get(key)) is not None and node.probe is not None
    }
    return replace(
        job,
        nodes={**job.nodes, **in_doubt} if in_doubt else job.nodes,
        round=replace(job.round, standing=False),
        replaced=_still_slow(job, job.round, now),
        recovery=replace(
            job.recovery,
            reached=job.round.step or job.recovery.reached,
            lasted=now - job.round.started,
        ),
        ledger=books.interrupted(job.ledger, cause, reason, now, lost),
        stop_grace=grace,
    )


def fail(job: Job, verdict: medic.Fail, now: float, policy: Policy) -> Job:
    """The job is over because of a failure."""
    job = replace(job, stop_grace=policy.failure_grace)
    result = Result(exit_code=1, reason=verdict.reason, cause=str(verdict.cause), root=verdict.root)
    return end(job, result, now, verdict.cause)


def drained(job: Job, reason: str, now: float, policy: Policy) -> Job:
    """The job is over for now, since somebody asked for it."""
    result = Result(exit_code=DRAINED, reason=reason, resumable=True)
    return end(replace(job, stop_grace=policy.drain_timeout), result, now)


def end(job: Job, result: Result, now: float, cause: str = "") -> Job:
    """The job is over; cause: what cut its last step short, if anything did."""
    return replace(job, result=result, ledger=books.closed(job.ledger, now, cause))


def lose(
    job: Job, gone: Sequence[Node], cause: Cause, what: str, now: float, policy: Policy
) -> Step:
    """Take nodes out; the round ends with them if it needs one of them."""
    reason = f"{names([node.node_id for node in gone])} {what}"
    hurt = any(needed(job, node) for node in gone)
    job = forget(job, gone)
    if hurt:
        again = policy.supplied and cause is Cause.NODE_LOST  # whoever supplies them may know more
        lost = tuple(node.node_id for node in gone) if again else ()
        job = interrupt(job, cause, reason, now, policy, lost=lost)
    return job, (), reason


def excuse(job: Job, node_id: NodeId, cause: Cause, reason: str) -> Job:
    """Who was taken for lost was taken away, which costs nothing: what was charged for it is given back."""
    ledger = books.excused(job.ledger, node_id, cause, reason)
    is_paid = ledger.restarts.get(Cause.NODE_LOST, 0) < job.ledger.restarts.get(Cause.NODE_LOST, 0)
    back = min(job.recovery.faults, int(is_paid))
    return replace(
        job, ledger=ledger, recovery=replace(job.recovery, faults=job.recovery.faults - back)
    )


def forget(job: Job, gone: Collection[Node]) -> Job:
    nodes = registry.without(job.nodes, {node.node_id for node in gone})
    return replace(job, nodes=nodes, spent=registry.spend(job.spent, gone))


def probe(job: Job, nodes: Sequence[Node], now: float, policy: Policy) -> Job:
    """Have them probe themselves."""
    asked = {
        node.node_id: replace(
            node, probe=registry.Probe(number=number, level=policy.precheck, since=now)
        )
        for number, node in enumerate(nodes, job.probes + 1)
    }
    return replace(job, nodes={**job.nodes, **asked}, probes=job.probes + len(asked))


def doubt(
    job: Job, node_ids: Iterable[NodeId], why: str, now: float, policy: Policy
) -> tuple[Job, str]:
    """What has happened may be the fault of one of these machines, or of what is between them: they are tried before
    they train again."""
    nodes = [job.nodes[node_id] for node_id in node_ids if node_id in job.nodes]
    checks = prechecks.doubt(nodes, job.checks, why, now, policy)
    if checks is job.checks:
        return job, ""
    job = probe(replace(job, checks=checks), nodes, now, policy)
    return job, f"probing {names([node.node_id for node in nodes])}: {why}"


def drain(job: Job, node: Node, reason: str, now: float, policy: Policy, why: str = "") -> Step:
    """A node leaves; others stay. why: a `Why`, where it is not simply asked for."""
    if in_round(job, node):
        job = plan(job, Cause.REQUEST, reason, now, policy)
    job = replace(job, nodes=registry.with_node(job.nodes, replace(node, draining=True, why=why)))
    return job, (ev.Tell(frozenset({node.node_id})),), reason


def names(node_ids: Sequence[str]) -> str:
    """Some of them, where there are many."""
    if len(node_ids) <= 5:
        return ", ".join(node_ids)
    return f"{', '.join(node_ids[:3])} and {len(node_ids) - 3} more"


def one_line(text: str) -> str:
    return " ".join(text.split())
