"""Which snapshot is whole, loaded, written, committed: by what nodes say, in any order."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic.master.checkpoints import Checkpoint, Orders, Whole, decide, forget, hear
from elastic.master.events import Incarnation, NodeId
from elastic.master.holdings import (
    NOTHING,
    Holding,
    Look,
    Looked,
    Member,
    Restore,
    Said,
    Shard,
    sound,
    trusted,
    void,
)
from elastic.proto.moment import Moment, Span

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
LIFE = Incarnation(1)
FILE = Shard(bytes=10, digest=1)


def holds(*ranks: int, of: int = 2, units: tuple[int, ...] | None = None, **more: Any) -> Holding:
    """Images of these ranks, each a unit of its own unless told otherwise."""
    return Holding(
        world_size=of,
        ranks=frozenset(ranks),
        units=frozenset(ranks if units is None else units),
        **more,
    )


def says(node_id: NodeId, holdings: dict[tuple[int, int], Holding], **more: Any) -> Said:
    found = {Moment(*moment): holding for moment, holding in holdings.items()}
    return Said(node_id=node_id, incarnation=LIFE, holdings=found, **more)


def found(
    number: int,
    stored: tuple[int, int] | None,
    *,
    load: int = 1,
    known: Moment = NOTHING,
    error: str = "",
) -> Looked:
    """What rank 0 of a round found on storage."""
    moment = None if stored is None else Moment(*stored)
    return Looked(look=Look(round=number, load=load, known=known), stored=moment, error=error)


def heard(*said: Said) -> Checkpoint:
    state = Checkpoint()
    for one in said:
        state = hear(state, one)
    return state


def told(*said: Said, number: int = 1, members: tuple[NodeId, ...] = (A, B)) -> Orders:
    return orders(heard(*said), number, members)


def orders(
    state: Checkpoint, number: int, members: tuple[NodeId, ...], *, ending: bool = False
) -> Orders:
    """Each node with one rank."""
    seats = [Member(node_id, range(i, i + 1)) for i, node_id in enumerate(members)]
    return decide(state, number, seats, ending=ending)[1]


SEATS = [Member(A, range(1)), Member(B, range(1, 2))]


def test_it_is_whole_once_every_rank_has_it() -> None:
    assert heard(says(A, {(1, 5): holds(0)})).whole is None
    both = heard(says(A, {(1, 5): holds(0)}), says(B, {(1, 5): holds(1)}))
    assert both.whole == Whole(moment=Moment(1, 5), units=2)
    ahead = hear(both, says(A, {(1, 5): holds(0), (1, 6): holds(0)}))
    assert ahead.whole == both.whole


def test_equal_images_are_one_unit() -> None:
    state = heard(says(A, {(1, 5): holds(0, units=(7,))}), says(B, {(1, 5): holds(1, units=(7,))}))
    assert state.whole == Whole(moment=Moment(1, 5), units=1)


def test_a_round_later_is_newer_whatever_its_step() -> None:
    state = heard(says(A, {(1, 9): holds(0, of=1), (2, 4): holds(0, of=1)}))
    assert state.whole is not None
    assert state.whole.moment == Moment(2, 4)


def test_what_is_never_whole_on_one_node_is_told_to_all_of_its_round() -> None:
    lost = {Moment(1, 9): "of old", Moment(2, 5): "ranks 0, 1 differ"}
    state = heard(says(A, {}, lost=lost), says(B, {(2, 5): holds(2, of=3)}))
    assert orders(state, 2, (A, B)).lost == {Moment(2, 5): "ranks 0, 1 differ"}
    assert not orders(forget(state, A, LIFE), 2, (A, B)).lost


def test_what_ranks_have_left_out_is_told_to_all_of_its_round() -> None:
    """Also once something newer is whole: who waits for what it has may not have heard of it before."""
    a = says(A, {(2, 7): holds(0)}, left_out=(Span(1, 1, 9), Span(2, 4, 6)))
    b = says(B, {}, left_out=(Span(2, 6, 6), Span(2, 8, 8)))
    told = (Span(2, 4, 6), Span(2, 8, 8))
    assert orders(heard(a, b), 2, (A, B)).left_out == told
    whole = orders(hear(heard(a, b), replace(b, holdings={Moment(2, 7): holds(1)})), 2, (A, B))
    assert whole.whole is not None
    assert whole.left_out == told


def test_it_is_read_only_where_all_who_speak_say_so_and_stays_it_when_they_go() -> None:
    reads, saves = says(A, {}, read_only=True), says(B, {})
    assert not Checkpoint().read_only
    assert heard(reads).read_only
    assert forget(heard(reads), A, LIFE).read_only
    assert not heard(reads, saves).read_only
    assert not forget(heard(saves), B, LIFE).read_only
    assert not hear(heard(reads), replace(reads, read_only=False)).read_only
    assert heard(reads, saves, replace(saves, read_only=True)).read_only


def test_what_is_damaged_on_one_node_is_not_lost_while_another_has_it() -> None:
    lost = {Moment(1, 5): "rank 0: its slot is damaged"}
    state = heard(says(A, {}, lost=lost), says(B, {(1, 5): holds(0, 1)}))
    assert not orders(state, 1, (A, B)).lost
    state = hear(state, says(B, {(1, 5): holds(1)}))
    assert orders(state, 1, (A, B)).lost == lost


# --- restore -------------------------------------------------------------------------------------


def test_nobody_is_answered_before_all_have_asked() -> None:
    first = says(A, {}, asks=1, looked=found(1, None))
    assert told(first, members=()).restore is None
    assert told(first).restore is None
    assert "1 nodes of round 1 have not asked yet" in told(first).reason
    assert told(first, says(B, {}, asks=1)).restore == Restore(round=1, moment=None)


def test_memory_that_covers_the_state_is_loaded_and_storage_not_looked_at() -> None:
    a = says(A, {(1, 5): holds(0)}, asks=2, committed=Moment(1, 4))
    b = says(B, {(1, 5): holds(1)}, asks=2)
    answer = told(a, b, number=2)
    assert answer.restore == Restore(round=2, moment=Moment(1, 5), from_memory=True)
    assert answer.look is None


def test_rank_0_looks_on_storage_where_nobody_has_ever_said_what_is_there() -> None:
    a, b = says(A, {(1, 5): holds(0)}, asks=2), says(B, {(1, 5): holds(1)}, asks=2)
    answer = told(a, b, number=2)
    assert (answer.restore, answer.look) == (None, (A, Look(round=2, load=1)))
    for stored, from_memory in (((1, 4), True), ((2, 1), False), (None, True)):
        at = Moment(2, 1) if stored == (2, 1) else Moment(1, 5)
        looked = replace(a, looked=found(2, stored))
        expected = Restore(round=2, moment=at, from_memory=from_memory)
        assert told(looked, b, number=2).restore == expected
        assert told(looked, b, number=2).look is None
    forgotten = hear(heard(replace(a, looked=found(2, (1, 4)))), a)
    assert forgotten.known == Moment(1, 4), "once heard is enough"


def test_storage_that_has_more_than_memory_is_looked_at() -> None:
    """Also where it cannot have it any more: what was looked for in another round says nothing."""
    known = Moment(1, 6)
    a = says(A, {(1, 5): holds(0)}, asks=2, committed=known, looked=found(1, (1, 6)))
    b = says(B, {(1, 5): holds(1)}, asks=2)
    look = Look(round=2, load=1, known=known)
    assert told(a, b, number=2).look == (A, look)
    there = replace(a, looked=Looked(look=look, stored=known))
    assert told(there, b, number=2).restore == Restore(round=2, moment=known)
    gone = replace(a, looked=Looked(look=look, stored=Moment(1, 2)))
    expected = Restore(round=2, moment=Moment(1, 5), from_memory=True)
    assert told(gone, b, number=2).restore == expected, "it was not to be had there"
    away = replace(a, looked=Looked(look=look, error="no route to it"))
    expected = Restore(round=2, moment=None, error="no route to it")
    assert told(away, b, number=2).restore == expected, "what is older is not taken for it"


def test_a_storage_that_cannot_be_looked_at_does_not_matter_to_memory() -> None:
    a = says(A, {(1, 5): holds(0, of=1)}, asks=2, looked=found(2, None, error="is it mounted?"))
    expected = Restore(round=2, moment=Moment(1, 5), from_memory=True)
    assert told(a, number=2, members=(A,)).restore == expected


def test_what_a_node_cannot_have_from_memory_goes_to_storage_first() -> None:
    a = says(A, {(1, 5): holds(0, 1)}, asks=2, committed=Moment(1, 4))
    new = says(C, {}, asks=2)
    waits = told(a, new, number=2, members=(A, C))
    assert (waits.restore, waits.look) == (None, None)
    assert waits.flush == {A: {Moment(1, 5): {0, 1}}}
    assert waits.reason.endswith("to be on storage: a node that has it in memory serves nobody yet")
    done = {(1, 5): holds(0, 1, durable={0: FILE, 1: FILE}, committed=True)}
    written = says(A, done, asks=2)
    look = Look(round=2, load=1, known=Moment(1, 5))
    assert told(written, new, number=2, members=(A, C)).look == (A, look)
    there = replace(written, looked=Looked(look=look, stored=Moment(1, 5)))
    answer = told(there, new, number=2, members=(A, C)).restore
    assert answer == Restore(round=2, moment=Moment(1, 5))


def test_what_was_looked_at_before_there_was_more_is_looked_at_again() -> None:
    done = {(1, 5): holds(0, 1, durable={0: FILE, 1: FILE}, committed=True)}
    a = says(A, done, asks=2, looked=found(2, (1, 4)))
    look = told(a, says(C, {}, asks=2), number=2, members=(A, C)).look
    assert look == (A, Look(round=2, load=1, known=Moment(1, 5)))


def test_a_node_that_holds_all_there_is_needs_no_storage() -> None:
    whole = {(1, 5): holds(0, units=(7,), all_units=1)}
    equal = says(A, whole, asks=2, committed=NOTHING), says(C, whole, asks=2)
    answer = told(*equal, number=2, members=(A, C)).restore
    assert answer == Restore(round=2, moment=Moment(1, 5), from_memory=True)


def test_a_lost_node_takes_its_images_with_it() -> None:
    a = says(A, {(1, 5): holds(0, all_units=2)}, asks=2, looked=found(2, (1, 4)))
    c = says(C, {}, asks=2)
    assert told(a, c, number=2, members=(A, C)).restore == Restore(round=2, moment=Moment(1, 4))


def test_equal_images_and_replicas_make_up_for_a_lost_node() -> None:
    equal = {(1, 5): holds(0, units=(7,), all_units=1)}
    replica = {(1, 5): holds(0, 1, all_units=2)}
    for holdings in (equal, replica):
        answer = told(says(A, holdings, asks=2, committed=NOTHING), number=2, members=(A,)).restore
        assert answer == Restore(round=2, moment=Moment(1, 5), from_memory=True)


def test_an_equal_image_is_trusted_only_where_a_master_has_counted_them() -> None:
    a = says(A, {(1, 5): holds(0, units=(7,))}, asks=2, looked=found(2, None))
    assert told(a, number=2, members=(A,)).restore == Restore(round=2, moment=None)


def test_storage_that_is_newer_than_memory_is_loaded() -> None:
    a = says(A, {(1, 5): holds(0, of=1)}, asks=3, looked=found(3, (2, 3)))
    assert told(a, number=3, members=(A,)).restore == Restore(round=3, moment=Moment(2, 3))


def test_a_step_that_is_asked_for_is_the_one_that_is_loaded() -> None:
    both = {(1, 5): holds(0, of=1), (1, 6): holds(0, of=1)}
    five = told(says(A, both, asks=2, wanted=5, committed=NOTHING), number=2, members=(A,)).restore
    assert five == Restore(round=2, moment=Moment(1, 5), from_memory=True)
    old = says(A, both, asks=2, wanted=2, looked=found(2, (1, 2)))
    assert told(old, number=2, members=(A,)).restore == Restore(round=2, moment=Moment(1, 2))
    assert heard(old).known is None, "what else there is was not looked for"


def test_an_answer_stays_the_same() -> None:
    answer = Restore(round=2, moment=Moment(1, 4))
    a = says(A, {(1, 5): holds(0)}, asks=2, answer=answer, committed=NOTHING)
    b = says(B, {(1, 5): holds(1)}, asks=2)
    assert told(a, b, number=2).restore == answer


def test_each_load_of_a_round_is_decided_anew_once_all_ask_for_it() -> None:
    """Also by a master that has answered none of those before."""
    a, b = (
        says(A, {(1, 5): holds(0)}, asks=1, committed=NOTHING),
        says(B, {(1, 5): holds(1)}, asks=1),
    )
    state, first = decide(heard(a, b), 1, SEATS)
    assert first.restore == Restore(round=1, moment=Moment(1, 5), from_memory=True)
    more = {(1, 5): holds(0), (1, 6): holds(0)}
    again = says(A, more, asks=1, load=2, answer=first.restore, committed=NOTHING)
    state, waits = decide(hear(state, again), 1, SEATS)
    assert waits.restore == first.restore
    assert waits.reason == "1 nodes of round 1 have not asked yet"
    late = says(B, {(1, 5): holds(1), (1, 6): holds(1)}, asks=1, load=2, answer=first.restore)
    second = Restore(round=1, load=2, moment=Moment(1, 6), from_memory=True)
    assert decide(hear(state, late), 1, SEATS)[1].restore == second
    assert told(again, late).restore == second


def without(said: Said, *damaged: tuple[tuple[int, int], bool]) -> Said:
    return sound(said, {(Moment(*moment), memory) for moment, memory in damaged})


def test_what_is_damaged_in_memory_is_taken_from_storage_or_the_step_before_it_is() -> None:
    held = {(1, 4): holds(0, of=1), (1, 5): holds(0, of=1, durable={0: FILE}, committed=True)}
    bad = without(says(A, held, asks=2, committed=Moment(1, 4)), ((1, 5), True))
    assert orders(heard(bad), 2, (A,), ending=True).flush == {}
    look = Look(round=2, load=1, known=Moment(1, 5))
    assert told(bad, number=2, members=(A,)).look == (A, look)
    there = replace(bad, looked=Looked(look=look, stored=Moment(1, 5)))
    assert told(there, number=2, members=(A,)).restore == Restore(round=2, moment=Moment(1, 5))
    both = without(there, ((1, 5), False))
    before = Restore(round=2, moment=Moment(1, 4), from_memory=True)
    assert told(both, number=2, members=(A,)).restore == before


def test_what_is_damaged_on_storage_is_not_known_to_be_there() -> None:
    a = without(
        says(A, {}, asks=3, committed=Moment(1, 5), looked=found(2, (1, 5))), ((1, 5), False)
    )
    assert told(a, number=3, members=(A,)).look == (A, Look(round=3, load=1))


def test_what_somebody_went_back_to_may_be_damaged() -> None:
    """Who looks passes over it for what was undone; then there is nothing to load, and that is said."""
    kept = Moment(2, 5)
    looked = found(3, (2, 9), known=kept)
    back = void(says(A, {}, asks=3, looked=looked), 2, kept)
    assert told(back, number=3, members=(A,)).restore == Restore(round=3, moment=kept)
    bad = void(says(A, {}, asks=3, looked=looked), 2, kept, damaged=True)
    order = told(sound(bad, {(kept, False)}), number=3, members=(A,)).restore
    assert order is not None
    assert order.error == "step 5, which somebody went back to, is damaged"


def test_what_was_saved_since_replicas_were_the_same_is_not_there() -> None:
    held = {(1, 4): holds(0, of=1), (1, 5): holds(0, of=1, persist=True), (1, 6): holds(0, of=1)}
    look = Looked(look=Look(round=2, load=1), stored=Moment(1, 5))
    said = trusted(says(A, held, asks=2, committed=Moment(1, 5), looked=look), 1, 4)
    assert list(said.holdings) == [Moment(1, 4)]
    assert (said.looked, said.committed) == (None, None)
    assert orders(heard(said), 2, (A,), ending=True).flush == {A: {Moment(1, 4): {0}}}
    other = says(A, {(1, 4): holds(0, of=1), (2, 9): holds(0, of=1)}, committed=Moment(2, 9))
    assert trusted(other, 1, 4) == other, "another round's"


# --- storage -------------------------------------------------------------------------------------


def test_only_what_is_whole_and_due_is_written() -> None:
    a = says(A, {(1, 5): holds(0, persist=True), (1, 6): holds(0)})
    assert told(a).flush == {}
    b = says(B, {(1, 5): holds(1), (1, 6): holds(1)})
    assert told(a, b).flush == {A: {Moment(1, 5): {0}}, B: {Moment(1, 5): {1}}}


def test_a_commit_follows_the_last_shard_and_ends_it() -> None:
    a = says(A, {(1, 5): holds(0, persist=True, durable={0: FILE})})
    b = says(B, {(1, 5): holds(1, persist=True)})
    assert told(a, b).commits == ()
    assert told(a, b).flush == {B: {Moment(1, 5): {1}}}
    done = says(B, {(1, 5): holds(1, persist=True, durable={1: FILE})})
    (commit,) = told(a, done).commits
    assert (commit.node_id, commit.moment) == (A, Moment(1, 5))
    assert commit.shards == {0: FILE, 1: FILE}
    written = says(A, {(1, 5): holds(0, persist=True, durable={0: FILE}, committed=True)})
    assert told(written, done) == replace(told(written, done), commits=(), flush={})


def test_a_replica_is_written_for_a_node_that_is_gone() -> None:
    a = says(A, {(1, 5): holds(0, 1, persist=True)})
    b = says(B, {(1, 5): holds(1, persist=True)})
    state = forget(heard(a, b), B, LIFE)
    assert orders(state, 1, (A,)).flush == {A: {Moment(1, 5): {0, 1}}}


def test_a_step_that_lost_a_shard_is_not_written() -> None:
    a = says(A, {(1, 5): holds(0, persist=True), (1, 6): holds(0)})
    b = says(B, {(1, 5): holds(1, persist=True), (1, 6): holds(1)})
    later = hear(heard(a, b), says(B, {(1, 6): holds(1)}))
    assert orders(later, 1, (A, B)).flush == {}


def test_at_the_end_the_newest_is_written_though_it_was_not_due() -> None:
    state = heard(says(A, {(1, 5): holds(0)}), says(B, {(1, 5): holds(1)}))
    assert orders(state, 1, (A, B)).flush == {}
    assert orders(state, 1, (A, B), ending=True).flush.keys() == {A, B}
    alone = forget(state, B, LIFE)
    assert orders(alone, 1, (A,), ending=True).flush == {}
    assert orders(forget(alone, A, LIFE), 1, (), ending=True).flush == {}


# --- a job, at random ----------------------------------------------------------------------------


@given(st.data())
def test_what_is_loaded_from_memory_is_there(data: st.DataObject) -> None:
    """Three nodes of one rank save, are replicated, forget, are lost, in any order; whatever a round
    is told to load from memory, the images of it that are there are all that it had."""
    nodes = (A, B, C)
    held: dict[NodeId, dict[Moment, set[int]]] = {node: {} for node in nodes}
    state = Checkpoint()
    whole: set[Moment] = set()
    step = 0
    for _ in range(data.draw(st.integers(1, 25))):
        rank = data.draw(st.integers(0, 2))
        node = nodes[rank]
        match data.draw(st.sampled_from(["save", "replicate", "drop", "lose"])):
            case "save":
                step = data.draw(st.integers(step, step + 1))
                held[node].setdefault(Moment(1, step), set()).add(rank)
            case "replicate":
                for moment, ranks in held[node].items():
                    if rank in ranks:
                        held[nodes[rank - 1]].setdefault(moment, set()).add(rank)
            case "drop":
                keep = state.whole.moment if state.whole else None
                held[node] = {m: r for m, r in held[node].items() if keep is None or m >= keep}
            case "lose":
                held[node] = {}
                state = forget(state, node, LIFE)
                continue
        count = state.whole.units if state.whole else 0
        at = state.whole.moment if state.whole else None
        holdings = {
            (m.round, m.step): holds(*r, of=3, all_units=count if m == at else 0)
            for m, r in held[node].items()
        }
        state = hear(state, says(node, holdings, asks=2, committed=NOTHING))
        if state.whole is not None and state.whole.moment not in whole:
            there = {r for n in state.said for r in held[n].get(state.whole.moment, ())}
            assert there == {0, 1, 2}
            whole.add(state.whole.moment)
        answer = orders(state, 2, tuple(state.said)).restore
        if answer is not None and answer.moment is not None:
            assert {r for n in state.said for r in held[n].get(answer.moment, ())} == {0, 1, 2}
