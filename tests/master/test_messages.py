"""What comes from the wire is bounded; what goes out is whole."""

from elastic.master import events as ev
from elastic.master import messages
from elastic.master.directive import Directive, Place
from elastic.master.events import Incarnation, NodeId, NodePhase
from elastic.master.nodes import Pairs, Probe
from elastic.proto import codec
from elastic.proto import master_pb2 as pb
from elastic.proto.limits import MOST_SLOTS
from elastic.proto.looks import Look
from tests.master.thousands import look

LONG = "x" * 100_000


def test_a_hello() -> None:
    hello = pb.Hello(
        node_id="a",
        incarnation=(1 << 64) - 1,
        slots=8,
        labels={"zone": "z", "rack": "r"},
        spare_store="[::1]:1",
        report=pb.NodeReport(round=3, phase=pb.NodeReport.RUNNING),
    )
    found = messages.attachment(hello)
    assert (found.node_id, found.incarnation, found.slots) == ("a", (1 << 64) - 1, 8)
    assert found.labels == (("rack", "r"), ("zone", "z"))
    assert found.node_rank is None
    assert (found.report.round, found.report.phase) == (3, NodePhase.RUNNING)
    assert messages.attachment(pb.Hello(node_rank=0)).node_rank == 0


def test_every_rank_of_a_node_may_fail() -> None:
    ranks = range(MOST_SLOTS + 1)
    told = pb.NodeReport(failures=[pb.RankFailure(rank=rank) for rank in ranks])
    assert [failure.rank for failure in messages.report(told).failures] == [*range(MOST_SLOTS)]


def test_texts_are_bounded() -> None:
    failure = pb.RankFailure(error_type=LONG, message=LONG, frame=LONG, log_tail=LONG + "end")
    found = messages.failure(failure)
    assert len(found.message) == len(found.log_tail) == messages.MAX_TEXT
    assert found.log_tail.endswith("end"), "of a log the end is what tells"
    assert len(found.error_type) <= 512 >= len(found.frame)
    hello = messages.attachment(
        pb.Hello(
            node_id=LONG,
            host=LONG,
            role=LONG,
            knock_address=LONG,
            spare_store=LONG,
            labels={str(i): LONG for i in range(100)},
        )
    )
    assert max(map(len, (hello.node_id, hello.host, hello.role, hello.store))) == 256
    assert len(hello.labels) == 32


def test_a_phase_of_a_newer_release_is_none() -> None:
    message = pb.NodeReport.FromString(b"\x10\x63")  # phase = 99
    assert messages.report(message).phase is NodePhase.IDLE


def test_a_node_hears_which_of_those_that_are_tested_it_is() -> None:
    a, b, c = map(NodeId, "abc")
    pairs = Pairs(
        prefix="probe/4", nodes=(b, a, c), pairs=((b, a), (b, c)), stores=("b:1", "c:1"), device="cuda", devices=8, deadline=60.0
    )  # fmt: skip
    order = Directive(kind="wait", probe=Probe(number=5, level="full", since=1.0, pairs=pairs))
    for node_id, number in ((b, 0), (a, 1), (c, 2)):
        sent = messages.directive(order, node_id, epoch=4).directive.probe
        assert (sent.number, sent.level, sent.pairs.node) == (5, "full", number)
        assert [*sent.pairs.stores] == ["b:1", "c:1"]
        assert (sent.pairs.nodes, [*sent.pairs.first], [*sent.pairs.second]) == (3, [0, 0], [1, 2])
        fields = {field.name for field in pb.Pairs.DESCRIPTOR.fields}
        assert {field.name for field, _ in sent.pairs.ListFields()} >= fields - {"node"}


def test_what_a_node_says_of_tests_with_others_is_bounded() -> None:
    message = pb.Paired(number=4, state="odd", what="x" * 9999, matmul=[0.5])
    for _ in range(messages.MOST_TESTS + 1):
        message.tests.add(passed=True, gather=0.25)
    said = messages.pairing(message, NodeId("a"), Incarnation(1))
    assert (said.state, len(said.what), said.gpu) == ("unknown", messages.MAX_TEXT, None)
    assert said.matmul == (0.5,)
    assert said.tests == (ev.PairTest(passed=True, gather=0.25),) * messages.MOST_TESTS


def test_a_directive_goes_out_whole() -> None:
    place = Place(
        node_rank=1,
        num_nodes=2,
        first_rank=3,
        local_world_size=4,
        world_size=7,
        role_first_rank=5,
        role_world_size=6,
    )
    order = Directive(
        kind="exit", round=9, place=place, store="s:1", launch="l", restart_count=2, stop_grace=1.5,
        exit_code=213, reason="because", prepare=True, goes_on=True,
        probe=Probe(number=3, level="quick", since=1.0),
    )  # fmt: skip
    sent = messages.directive(order, NodeId("b"), epoch=4).directive
    fields = {field.name for field in pb.Directive.DESCRIPTOR.fields}
    assert {field.name for field, _ in sent.ListFields()} == fields
    assert (sent.kind, sent.epoch, sent.first_rank, sent.role_world_size) == (
        pb.Directive.EXIT,
        4,
        3,
        6,
    )


def test_what_a_rank_has_moved_and_processes_that_it_began_have_done_is_told() -> None:
    told = Look(
        rank=0, pid=7, at=1.0, state="S", io_bytes=5, helpers_io_bytes=6, helpers_cpu_seconds=0.5
    )
    (one,) = messages.looks(NodeId("n"), [codec.dumps(told)], 1.0)
    assert (one.io, one.helpers_io, one.helpers_cpu) == (5, 6, 0.5)


def test_ranks_that_do_the_same_share_what_is_kept_of_it() -> None:
    """Else the looks at thousands would be gigabytes."""
    told = messages.looks(NodeId("n"), [look(rank, loops=rank == 2) for rank in range(3)], 1.0)
    assert told[0].stack is told[1].stack
    assert told[0].doing is told[1].doing
    assert told[2].stack != told[0].stack
    assert [one.rank for one in told] == [0, 1, 2]
