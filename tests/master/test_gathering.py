"""What comes in one moment is folded together, and what one node does stays in its order."""

from elastic.master import events as ev
from elastic.master.events import Event, Incarnation, KnockAnswer, NodeId
from elastic.master.gathering import Gathering, News
from tests.master.builders import attached, detached, knocked
from tests.master.serving import within


@within(120)
async def test_arrivals_are_one_event_and_a_nodes_own_order_is_kept() -> None:
    folded: list[Event] = []
    gathering = Gathering(folded.append)
    a, b = NodeId("a"), NodeId("b")
    gathering.add(a, knocked("a", KnockAnswer.ALIVE))
    gathering.add(b, attached("b"))
    gathering.add(a, attached("a"))
    gathering.add(b, detached("b"))
    gathering.add(a, detached("a"))
    gathering.add(b, attached("b", 2))
    assert gathering.arriving == 3
    gathering.flush()
    (together,) = folded
    assert isinstance(together, ev.Together)
    assert [(type(event), _nodes(event)) for event in together.events] == [
        (ev.Attached, [("b", 1)]),
        (ev.Knocked, [("a", 1)]),
        (ev.Attached, [("a", 1)]),
        (ev.Detached, [("b", 1)]),
        (ev.Attached, [("b", 2)]),
        (ev.Detached, [("a", 1)]),
    ]
    assert not gathering.arriving


@within(120)
async def test_a_single_thing_is_folded_as_it_is() -> None:
    folded: list[Event] = []
    gathering = Gathering(folded.append)
    gone = detached("a")
    gathering.add(NodeId("a"), gone)
    gathering.flush()
    gathering.flush()
    assert folded == [gone]


@within(120)
async def test_many_of_a_kind_are_one() -> None:
    folded: list[Event] = []
    gathering = Gathering(folded.append)
    for number in range(100):
        gathering.add(NodeId(f"n{number}"), attached(f"n{number}"))
        gathering.add(NodeId(f"n{number}"), detached(f"n{number}"))
    gathering.flush()
    (together,) = folded
    assert isinstance(together, ev.Together)
    assert [(type(e), len(e.nodes)) for e in together.events] == [
        (ev.Attached, 100),
        (ev.Detached, 100),
    ]


def _nodes(event: News) -> list[tuple[NodeId, Incarnation]]:
    if isinstance(event, ev.Detached | ev.Knocked):
        return [(node[0], node[1]) for node in event.nodes]
    return [(node.node_id, node.incarnation) for node in event.nodes]
