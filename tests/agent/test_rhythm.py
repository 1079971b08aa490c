"""How regularly a rank's optimizer steps, from looks at its page."""

from elastic.agent.rhythm import Rhythm

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
