"""What a node tells the master of one checkpoint."""

from collections.abc import Iterable

from elastic.agent.snapshots.checkpoint import Checkpoint, to_pb
from elastic.agent.snapshots.replicas import Replicas
from elastic.proto import master_pb2 as pb
from elastic.proto.moment import Moment


def of(known: Checkpoint, replicas: Replicas) -> pb.Snapshots:
    told = pb.Snapshots(
        checkpoint=known.name,
        answer=None if known.answer is None else _without_sources(known.answer),
        committed=known.committed,
        base=replicas.base,
        replicas=known.reckoned is not None and known.reckoned[1].replicas,
        unfit=[to_pb(at) for name, at in replicas.unfit if name == known.name],
        lost=[pb.Lost(moment=to_pb(at), reason=why) for at, why in known.lost],
        left_out=[pb.Span(round=s.round, first=s.first, last=s.last) for s in known.left_out],
    )
    known.loads.state(known.clients, told)
    told.holdings.extend(_holdings(known))
    return told


def _holdings(known: Checkpoint) -> Iterable[pb.Holding]:
    """By moment: what is in memory here, and what this node has written. What has holes is not told of,
    so that it is never whole to the master."""
    holdings: dict[Moment, pb.Holding] = {}
    held = known.slots.held()
    torn = known.torn(snapshot for _, snapshot in held)
    for one, snapshot in held:
        at, stamp = snapshot.moment, snapshot.stamp
        if at in torn or (at, stamp.rank) in known.flushes.damaged:
            continue
        holding = holdings.setdefault(at, pb.Holding(moment=to_pb(at)))
        holding.world_size = stamp.world_size
        holding.ranks.append(stamp.rank)
        if not any(node.first_rank == stamp.node.start for node in holding.nodes):
            holding.nodes.add(first_rank=stamp.node.start, ranks=len(stamp.node))
        holding.units.extend(set(snapshot.units) - set(holding.units))
        holding.all_units = max(holding.all_units, snapshot.all_units)
        holding.slot_bytes = max(holding.slot_bytes, len(one.view))
        holding.persist |= stamp.persist
    for key, written in known.flushes.written.items():
        at = Moment(*key)
        if at in torn:
            continue
        holding = holdings.setdefault(at, pb.Holding(moment=to_pb(at)))
        holding.world_size = holding.world_size or written.world_size
        holding.durable.extend(written.shards.values())
        holding.committed = written.committed
        holding.persist = True
    return holdings.values()


def _without_sources(answer: pb.Restore) -> pb.Restore:
    return pb.Restore(
        round=answer.round,
        load=answer.load,
        moment=answer.moment if answer.HasField("moment") else None,
        from_memory=answer.from_memory,
        error=answer.error,
    )
