"""How regularly a rank's optimizer steps, from looks at its page."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.rhythm import GRAIN_NS, Rhythm
from elastic.proto.page import KEPT, Beat

SECOND = 1_000_000_000


def test_steps_between_two_looks_count_as_evenly_spread() -> None:
    rhythm = Rhythm()
    for look in range(1, 20):
        rhythm.hear(5 * look, look * SECOND // 10, look * SECOND // 10)
    assert rhythm.take() == 0.02
    assert rhythm.take() == 0.0, "no tick came since"
    assert rhythm.quiet(3 * SECOND) == 3 - 1.9


def test_optimizers_that_step_together_make_no_steps_short() -> None:
    """Four at once, every 2 s."""
    rhythm = Rhythm()
    for look in range(1, 100):
        step = look // 20
        rhythm.hear(4 * step, step * 2 * SECOND, look * SECOND // 10)
    assert rhythm.take() >= 1.9


@given(
    st.lists(st.integers(min_value=1, max_value=10**10), min_size=2, max_size=60),
    st.sets(st.integers(min_value=1, max_value=59)),
    st.sampled_from([0, 1]),
)
def test_of_beats_every_interval_is_known_but_for_a_grain(
    took: list[int], looks: set[int], late: int
) -> None:
    """Whenever the page is looked at; late: a beat that came while it was, after the tick was read."""
    rhythm = Rhythm()
    ends = [sum(took[: n + 1]) for n in range(len(took))]
    every = [Beat(n, end, 0) for n, end in enumerate(ends, start=1)]
    rhythm.hear(1, ends[0], ends[0], 0, every[:1])
    for look in sorted(n for n in {*looks, len(ends)} if n <= len(ends)):
        new = every[rhythm.beat : look]
        read = look - late if look > 1 else look
        rhythm.hear(read, ends[read - 1], ends[look - 1], 0, new)
    longest = max(took[1:])
    assert max(longest - GRAIN_NS, min(took[1:])) <= 1e9 * rhythm.take() + 1 <= longest + 2
    assert rhythm.quiet(ends[-1] + SECOND) == 1.0


def test_beats_that_are_kept_no_more_make_no_interval_long() -> None:
    """Of an agent that stood still while its ranks trained on."""
    rhythm = Rhythm()
    beats = [Beat(n, n * SECOND, 0) for n in range(1, 1000)]
    rhythm.hear(2, 2 * SECOND, 2 * SECOND, 0, beats[:2])
    rhythm.hear(999, 999 * SECOND, 999 * SECOND, 0, beats[-KEPT:])
    assert rhythm.take() == 1.0


def test_nothing_is_quiet_while_its_node_stands_still() -> None:
    rhythm = Rhythm()
    rhythm.hear(1, SECOND, SECOND)
    rhythm.hear(2, 2 * SECOND, 2 * SECOND)
    rhythm.hear(2, 2 * SECOND, 60 * SECOND)
    assert rhythm.quiet(61 * SECOND) == 1.0


def test_what_comes_between_two_steps_by_name_is_no_steps_time() -> None:
    """An evaluation of a minute, named by the script."""
    rhythm = Rhythm()
    rhythm.hear(1, SECOND, SECOND)
    rhythm.hear(2, 2 * SECOND, 2 * SECOND)
    rhythm.take()
    rhythm.hear(2, 2 * SECOND, 3 * SECOND, phase_ns=3 * SECOND)
    rhythm.hear(3, 63 * SECOND, 63 * SECOND, phase_ns=62 * SECOND)
    assert rhythm.take() == 0.0
    rhythm.hear(4, 65 * SECOND, 65 * SECOND, phase_ns=62 * SECOND)
    assert rhythm.take() == 2.0


def test_steps_that_become_longer_for_good_are_steps_though_each_has_a_phase() -> None:
    """A longer sequence, in a script that names its loader's part."""
    rhythm = Rhythm()
    rhythm.hear(1, SECOND, SECOND)
    rhythm.hear(2, 2 * SECOND, 2 * SECOND, phase_ns=SECOND + 1)
    rhythm.take()
    rhythm.hear(3, 6 * SECOND, 6 * SECOND, phase_ns=2 * SECOND + 1)
    assert rhythm.take() == 0.0, "it may be an evaluation"
    rhythm.hear(4, 10 * SECOND, 10 * SECOND, phase_ns=6 * SECOND + 1)
    assert rhythm.take() == 4.0
    rhythm.hear(5, 14 * SECOND, 14 * SECOND, phase_ns=10 * SECOND + 1)
    assert rhythm.take() == 4.0


def test_phases_within_each_step_are_the_steps() -> None:
    """As a script's that names forward, backward and update."""
    rhythm = Rhythm()
    for tick in range(1, 10):
        rhythm.hear(tick, tick * SECOND, tick * SECOND, phase_ns=tick * SECOND - 1)
    assert rhythm.take() == 1.0


def test_an_evaluation_makes_no_steps_beside_it_long() -> None:
    """A minute in a named phase, with short steps before and behind it in one look."""
    ends = [10, 20, 60_020, 60_030, 60_040, 60_050]  # ms
    beats = [Beat(n, end * SECOND // 1000, 0) for n, end in enumerate(ends, start=1)]
    for split in range(1, 6):
        rhythm = Rhythm()
        rhythm.hear(1, beats[0].end_ns, beats[0].end_ns, 0, beats[:1])
        for new in (beats[1:split], beats[max(1, split) :]):
            if new:
                phase_ns = 60 * SECOND if new[-1].number > 2 else 0
                rhythm.hear(new[-1].number, new[-1].end_ns, new[-1].end_ns, phase_ns, new)
        assert rhythm.take() < 0.1, split
