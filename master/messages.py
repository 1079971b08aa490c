"""Between protobuf messages and the master's own dataclasses; texts are bounded here."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from elastic.master import events as ev
from elastic.master.activity import Doing, OnDevice, Process, beside, doing
from elastic.master.checkpoints import Orders
from elastic.master.directive import Directive
from elastic.master.endings import kind_of
from elastic.master.events import Failed, Incarnation, NodeId, NodePhase
from elastic.master.holdings import Holding, Look, Looked, Restore, Said, Shard
from elastic.master.journal import Note
from elastic.master.nodes import Probe
from elastic.master.policy import PRECHECKS
from elastic.master.seen import Collective, Seen
from elastic.master.tree import Call
from elastic.proto import codec
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import CodecError
from elastic.proto.limits import MOST_SLOTS
from elastic.proto.looks import Collective as RankCollective
from elastic.proto.looks import Frame, main_thread, telling
from elastic.proto.looks import Look as RankLook
from elastic.proto.moment import MOST_SPANS, Moment, Span

MAX_TEXT = 4096
"""Characters kept of any text that a node sends."""
MOST_RANKS = 1 << 24
"""Of a process group."""
MOST_TESTS = 256
"""Of one node with others, in one round."""
MOST_LINES, MAX_LINE = 8, 300
"""Lines of a kernel's log that are kept, and characters of each."""

_PHASES = {
    pb.NodeReport.IDLE: NodePhase.IDLE,
    pb.NodeReport.RUNNING: NodePhase.RUNNING,
    pb.NodeReport.FINISHED: NodePhase.FINISHED,
    pb.NodeReport.FAILED: NodePhase.FAILED,
}
_FAILED = {
    pb.RankFailure.RANK: Failed.RANK,
    pb.RankFailure.STORE: Failed.STORE,
    pb.RankFailure.START: Failed.START,
    pb.RankFailure.LOG: Failed.LOG,
    pb.RankFailure.TIMER: Failed.TIMER,
}
_KINDS = {"wait": pb.Directive.WAIT, "run": pb.Directive.RUN, "exit": pb.Directive.EXIT}


def attachment(hello: pb.Hello) -> ev.Attachment:
    return ev.Attachment(
        node_id=NodeId(hello.node_id[:256]),
        incarnation=Incarnation(hello.incarnation),
        slots=hello.slots,
        host=hello.host[:256],
        knock_address=hello.knock_address[:256],
        role=hello.role[:256],
        labels=tuple((k[:256], v[:256]) for k, v in sorted(hello.labels.items())[:32]),
        node_rank=hello.node_rank if hello.HasField("node_rank") else None,
        store=hello.spare_store[:256],
        report=report(hello.report),
    )


def report(message: pb.NodeReport) -> ev.Report:
    return ev.Report(
        round=message.round,
        phase=_PHASES.get(message.phase, NodePhase.IDLE),
        failures=tuple(failure(f) for f in message.failures[:MOST_SLOTS]),
        ended=tuple(message.ended[:MOST_SLOTS]),
    )


def failure(message: pb.RankFailure) -> ev.RankFailure:
    return ev.RankFailure(
        rank=message.rank,
        local_rank=message.local_rank,
        exit_code=message.exit_code,
        error_type=message.error_type[:256],
        message=message.message[:MAX_TEXT],
        frame=message.frame[:512],
        log_tail=message.log_tail[-MAX_TEXT:],
        oom_killed=message.oom_killed,
        what=_FAILED.get(message.what, Failed.RANK),
        kernel_log=kernel_log(message.kernel_log),
    )


def health(message: pb.Probed, node_id: NodeId, incarnation: Incarnation) -> ev.Health:
    return ev.Health(
        node_id=node_id,
        incarnation=incarnation,
        number=message.number,
        level=message.level if message.level in PRECHECKS else PRECHECKS[0],
        state=message.state if message.state in ("ok", "faulty") else "unknown",
        what=message.what[:MAX_TEXT],
        seconds=message.seconds,
        device="cuda" if message.device == "cuda" else "cpu",
        devices=min(max(message.devices, 1), MOST_SLOTS),
    )


def pairing(message: pb.Paired, node_id: NodeId, incarnation: Incarnation) -> ev.Pairing:
    tests = (
        ev.PairTest(
            passed=one.passed,
            late=one.late,
            what=one.what[:MAX_TEXT],
            gather=one.gather,
        )
        for one in message.tests[:MOST_TESTS]
    )
    return ev.Pairing(
        node_id=node_id,
        incarnation=incarnation,
        number=message.number,
        state=message.state if message.state in ("ok", "faulty") else "unknown",
        what=message.what[:MAX_TEXT],
        gpu=message.gpu if message.HasField("gpu") else None,
        matmul=tuple(message.matmul[:MOST_SLOTS]),
        tests=tuple(tests),
    )


def _probe(probe: Probe | None, node_id: NodeId) -> pb.Probe:
    if probe is None:
        return pb.Probe()
    asked = pb.Probe(number=probe.number, level=probe.level)
    if (pairs := probe.pairs) is not None:
        at = {member: number for number, member in enumerate(pairs.nodes)}
        asked.pairs.CopyFrom(
            pb.Pairs(
                stores=pairs.stores,
                prefix=pairs.prefix,
                node=at[node_id],
                nodes=len(pairs.nodes),
                first=[at[a] for a, _ in pairs.pairs],
                second=[at[b] for _, b in pairs.pairs],
                device=pairs.device,
                devices=pairs.devices,
                deadline=pairs.deadline,
            )
        )
    return asked


def record(note: Note) -> pb.EventRecord:
    return pb.EventRecord(
        sequence=note.sequence,
        time=note.wall,
        job_time=note.job,
        kind=note.kind,
        reason=note.reason,
        detail_json=note.detail,
    )


def directive(order: Directive, node_id: NodeId, epoch: int) -> pb.ToAgent:
    place = order.place
    return pb.ToAgent(
        directive=pb.Directive(
            kind=_KINDS[order.kind],
            epoch=epoch,
            round=order.round,
            node_rank=place.node_rank,
            num_nodes=place.num_nodes,
            first_rank=place.first_rank,
            local_world_size=place.local_world_size,
            world_size=place.world_size,
            store=order.store,
            launch=order.launch,
            role_first_rank=place.role_first_rank,
            role_world_size=place.role_world_size,
            prepare=order.prepare,
            probe=_probe(order.probe, node_id),
            restart_count=order.restart_count,
            stop_grace=order.stop_grace,
            exit_code=order.exit_code,
            reason=order.reason,
            ending=_ending(order) if order.kind == "exit" else None,
            goes_on=order.goes_on,
        )
    )


def _ending(order: Directive) -> pb.Ending:
    told = order.ending
    return pb.Ending(
        kind=kind_of(order.exit_code, told.cause),
        rank=told.rank,
        exception=told.exception,
        fingerprint=told.fingerprint,
        step=told.step,
    )


# --- snapshots -----------------------------------------------------------------------------------

MOST_HOLDINGS = 256
"""Moments that one node has something of."""
MOST_DAMAGED = 64
"""Damages that one message names."""
MOST_LOST = 16
"""Moments that are never whole, the newest, that one node or order names."""
MOST_WHAT = 500
"""Characters kept of what is damaged."""


def said(message: pb.Snapshots, node_id: NodeId, incarnation: Incarnation) -> Said:
    return Said(
        node_id=node_id,
        incarnation=incarnation,
        holdings=_newest_holdings(message),
        asks=message.asks,
        wanted=message.wanted if message.HasField("wanted") else None,
        load=message.load,
        looked=_looked(message.looked) if message.HasField("looked") else None,
        committed=moment(message.committed) if message.HasField("committed") else None,
        answer=_restore(message.answer) if message.HasField("answer") else None,
        base=message.base[:MAX_TEXT],
        replicas=message.replicas,
        unfit=frozenset(moment(at) for at in message.unfit[:MOST_HOLDINGS]),
        lost={moment(one.moment): one.reason[:MAX_TEXT] for one in message.lost[-MOST_LOST:]},
        left_out=tuple(Span(s.round, s.first, s.last) for s in message.left_out[-MOST_SPANS:]),
        read_only=message.read_only,
    )


def _newest_holdings(message: pb.Snapshots) -> dict[Moment, Holding]:
    newest = sorted(message.holdings, key=lambda one: moment(one.moment))[-MOST_HOLDINGS:]
    return {moment(one.moment): _holding(one) for one in newest}


def damaged(message: pb.Snapshots, checkpoint: str) -> Iterator[ev.Damaged]:
    """What ranks of a node have found to be."""
    for one in message.damaged[:MOST_DAMAGED]:
        damage = ev.Damage(
            checkpoint=checkpoint,
            round=one.moment.round,
            step=one.moment.step,
            from_memory=one.from_memory,
            what=one.what[:MOST_WHAT],
        )
        yield ev.Damaged(one.round, damage)


def doubted(message: pb.Snapshots, checkpoint: str) -> Iterator[ev.Doubted]:
    """What ranks of a node have saved, and do not trust."""
    for one in message.doubts[:MOST_DAMAGED]:
        yield ev.Doubted(
            round=one.round,
            checkpoint=checkpoint,
            after=one.after,
            ranks=tuple(one.ranks[:MOST_SLOTS]),
            what=one.what[:MOST_WHAT],
        )


def name_damaged(damages: Sequence[ev.Damage], look: pb.StorageLook) -> None:
    """Add what rank 0 is to pass over: the last, where there is much."""
    for one in [one for one in damages if not one.from_memory][-MOST_DAMAGED:]:
        at = pb.Moment(round=one.round, step=one.step)
        look.damaged.add(moment=at, what=one.what, later=one.later)


def moment(message: pb.Moment) -> Moment:
    return Moment(round=message.round, step=message.step)


def _holding(message: pb.Holding) -> Holding:
    return Holding(
        world_size=message.world_size,
        ranks=frozenset(message.ranks),
        units=frozenset(message.units),
        all_units=message.all_units,
        nodes=tuple(range(n.first_rank, n.first_rank + n.ranks) for n in message.nodes),
        slot_bytes=message.slot_bytes,
        persist=message.persist,
        durable={s.rank: Shard(bytes=s.bytes, digest=s.digest) for s in message.durable},
        committed=message.committed,
    )


def _looked(message: pb.Looked) -> Looked:
    look = message.look
    return Looked(
        look=Look(round=look.round, load=look.load, known=moment(look.known)),
        stored=moment(message.stored) if message.HasField("stored") else None,
        error=message.error[:MAX_TEXT],
    )


def _restore(message: pb.Restore) -> Restore:
    return Restore(
        round=message.round,
        load=message.load,
        moment=moment(message.moment) if message.HasField("moment") else None,
        from_memory=message.from_memory,
        error=message.error[:MAX_TEXT],
    )


def snapshot_orders(checkpoint: str, orders: Orders) -> pb.SnapshotOrders:
    """What is the same for every node."""
    told = pb.SnapshotOrders(checkpoint=checkpoint, pending=bool(orders.flush or orders.commits))
    if orders.committed is not None:
        told.committed.CopyFrom(_moment(orders.committed))
    told.keep.extend(map(_moment, orders.keep))
    for at, why in sorted(orders.lost.items())[-MOST_LOST:]:
        told.lost.add(moment=_moment(at), reason=why)
    for span in orders.left_out:
        told.left_out.add(round=span.round, first=span.first, last=span.last)
    if orders.whole is not None:
        told.whole.CopyFrom(_moment(orders.whole.moment))
        told.all_units = orders.whole.units
    if orders.restore is not None:
        restore = orders.restore
        told.restore.round, told.restore.load = restore.round, restore.load
        told.restore.from_memory, told.restore.error = restore.from_memory, restore.error
        if restore.moment is not None:
            told.restore.moment.CopyFrom(_moment(restore.moment))
    return told


def own_part(
    node_id: NodeId, orders: Orders, said: Mapping[NodeId, Said], told: pb.SnapshotOrders
) -> None:
    """Add what one node is to write, to copy, to look at, and where its ranks find what it has not."""
    if orders.look is not None and orders.look[0] == node_id:
        look = orders.look[1]
        told.look.round, told.look.load = look.round, look.load
        told.look.known.CopyFrom(_moment(look.known))
    for at, ranks in orders.flush.get(node_id, {}).items():
        told.flush.add(moment=_moment(at), ranks=sorted(ranks))
    for commit in orders.commits:
        if commit.node_id == node_id:
            shards = [
                pb.Shard(rank=rank, bytes=shard.bytes, digest=shard.digest)
                for rank, shard in sorted(commit.shards.items())
            ]
            told.commits.add(moment=_moment(commit.moment), shards=shards)
    for source in orders.sources.get(node_id, ()):
        told.restore.sources.add(base=source.base, ranks=source.ranks, needed=source.needed)
    copying = orders.copying
    for rank, source_id in ({} if copying is None else copying.copies.get(node_id, {})).items():
        assert copying is not None
        its = said.get(source_id)
        holding = None if its is None else its.holdings.get(copying.moment)
        if its is not None and holding is not None:
            told.fetch.add(
                moment=_moment(copying.moment),
                rank=rank,
                base=its.base,
                slot_bytes=holding.slot_bytes,
                all_units=copying.units,
            )


def _moment(at: Moment) -> pb.Moment:
    return pb.Moment(round=at.round, step=at.step)


def looks(node_id: NodeId, told: Sequence[str], now: float) -> tuple[Seen, ...]:
    """What a node has seen of its ranks; what is none is left out."""
    found = []
    for text in told[:MOST_SLOTS]:
        try:
            found.append(_seen(node_id, codec.loads(RankLook, text), now))
        except CodecError:
            continue
    return tuple(found)


def kernel_log(lines: Sequence[str]) -> tuple[str, ...]:
    """As much of it as is kept."""
    return tuple(line[:MAX_LINE] for line in lines[:MOST_LINES])


@lru_cache(codec.MOST_SHARED)
def _doing(
    frames: tuple[Frame, ...],
    state: str,
    wchan: str,
    gil: bool | None,
) -> tuple[tuple[Call, ...], Doing]:
    """A stack, and what a rank does there: one object of each for all ranks that do the same."""
    stack = tuple((frame.function, frame.file, frame.line) for frame in frames)
    return stack, doing(stack, state=state, wchan=wchan, gil=gil)


def _members(told: RankCollective) -> range:
    if told.stride < 1 or not 0 < told.count <= MOST_RANKS:
        return range(0)
    return range(told.first, told.first + told.stride * told.count, told.stride)


def _seen(node_id: NodeId, look: RankLook, now: float) -> Seen:
    children = [
        Process(
            pid=child.pid,
            state=child.state,
            command=child.command,
            switches=child.switches,
            failed=bool(child.status),
        )
        for child in look.children
    ]
    main = main_thread(look)
    gil = None if main is None else main.gil
    stack, found = _doing(telling(look), look.state, look.wchan, gil)
    found = beside(found, children) if children else found
    issued = look.collectives
    return Seen(
        rank=look.rank,
        node=node_id,
        state=look.state,
        doing=found,
        stack=stack,
        at=now,
        sure=gil is not None,
        ticks=look.ticks,
        cpu=look.main_cpu_seconds,
        run_delay=look.main_run_delay,
        io=look.io_bytes,
        helpers_cpu=look.helpers_cpu_seconds,
        helpers_io=look.helpers_io_bytes,
        taken=look.at,
        free=gil is False and bool(stack) and stack[0] != found.call,
        kernel=tuple(line.partition("+")[0] for line in look.kernel_stack),
        on_device=OnDevice(look.on_device.value),
        transfers=None
        if look.transfers is None
        else {one.peer: (one.sent, one.received) for one in look.transfers},
        collectives=None
        if issued is None
        else tuple(
            Collective(
                group=c.group,
                seq=c.seq,
                op=c.op,
                sizes=c.sizes,
                p2p=c.p2p,
                device=c.device,
                started=c.started,
                done=c.done,
                before=c.before,
                members=_members(c),
            )
            for c in issued
        ),
    )
