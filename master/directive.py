"""What one node should be doing now: a pure function of the job. Stated whole, each time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elastic.master import prechecks
from elastic.master.events import NodeId
from elastic.master.nodes import Node, Probe
from elastic.master.recovery import Cause, fingerprint
from elastic.master.rendezvous import with_ranks
from elastic.master.state import DRAINED, Job, Result, Round, Why, one_line

MOST_SAID = 1000
"""Characters of an exception and of a fingerprint that every node is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node's place in a round; O(1) in the size of the world."""

    node_rank: int = 0
    num_nodes: int = 0
    first_rank: int = 0
    local_world_size: int = 0
    world_size: int = 0
    role_first_rank: int = 0
    role_world_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Why a job is over, or a node's part in it, as data."""

    cause: str = ""
    rank: int | None = None
    exception: str = ""
    fingerprint: str = ""
    step: int = 0


def ended(job: Job, result: Result) -> Ended:
    root = result.root
    if root is None:
        return Ended(cause=result.cause, step=job.ledger.step)
    failure = root.failure
    said = ": ".join(filter(None, (failure.error_type, one_line(failure.message))))
    return Ended(
        cause=result.cause,
        rank=failure.rank,
        exception=said[:MOST_SAID],
        fingerprint=fingerprint(Cause(result.cause), root)[:MOST_SAID],
        step=job.ledger.step,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    kind: Literal["wait", "run", "exit"]
    round: int = 0
    place: Place = Place()
    store: str = ""
    """To run: the round's. To wait: a store of the node's own that a round took; it may be over
    before its node heard of it, and the node must make another.
    """
    prepare: bool = False
    """To wait: build a standby meanwhile."""
    probe: Probe | None = None
    """To wait: what the node is to try."""
    launch: str = ""
    """To run: another each time that the job's command is given."""
    restart_count: int = 0
    stop_grace: float = 0.0
    """Seconds between SIGTERM and SIGKILL for ranks of older rounds."""
    exit_code: int = 0
    reason: str = ""
    ending: Ended = Ended()
    """To exit: why."""
    goes_on: bool = False
    """To exit: the job goes on without this node."""


def places(current: Round | None) -> Mapping[NodeId, Place]:
    """Every node's place in the standing round; empty if none stands."""
    if current is None or not current.standing:
        return {}
    world = sum(seat.ranks for seat in current.seats)
    roles: dict[str, int] = {}
    for seat in current.seats:
        role = current.roles[seat.node_id]
        roles[role] = roles.get(role, 0) + seat.ranks
    in_role = dict.fromkeys(roles, 0)
    found: dict[NodeId, Place] = {}
    for index, (seat, ranks) in enumerate(with_ranks(current.seats)):
        role = current.roles[seat.node_id]
        found[seat.node_id] = Place(
            node_rank=index,
            num_nodes=len(current.seats),
            first_rank=ranks.start,
            local_world_size=len(ranks),
            world_size=world,
            role_first_rank=in_role[role],
            role_world_size=roles[role],
        )
        in_role[role] += len(ranks)
    return found


def _why(job: Job, node: Node) -> str:
    """Why it drains, in words."""
    fault = prechecks.fault(node, job.checks) if node.why == Why.UNHEALTHY else ""
    return f"drained, since its check failed: {fault}" if fault else "drained"


def directive(job: Job, node_id: NodeId, seated: Mapping[NodeId, Place]) -> Directive:
    """What `node_id` should be doing now; `seated` is `places(job.round)`."""
    if job.result is not None:
        return Directive(
            kind="exit",
            round=job.last_round,
            exit_code=job.result.exit_code,
            reason=job.result.reason,
            ending=ended(job, job.result),
            stop_grace=job.stop_grace,
        )
    node, place = job.nodes.get(node_id), seated.get(node_id)
    current = job.round
    if (
        node is not None
        and place is not None
        and current is not None
        and current.incarnations.get(node_id) == node.incarnation
    ):
        return Directive(
            kind="run",
            round=current.number,
            place=place,
            store=current.store,
            launch=job.launch,
            restart_count=job.restart_count,
            stop_grace=job.stop_grace,
        )
    if node is not None and node.draining:
        return Directive(
            kind="exit",
            round=job.last_round,
            exit_code=DRAINED,
            reason=_why(job, node),
            ending=Ended(cause=node.why, step=job.ledger.step),
            goes_on=any(not one.draining for one in job.nodes.values()),
            stop_grace=job.stop_grace,
        )
    spent = node.used_store if node is not None and not node.store else ""
    return Directive(
        kind="wait",
        round=job.last_round,
        store=spent,
        prepare=job.plain,
        probe=node.probe if node is not None else None,
        stop_grace=job.stop_grace,
    )
