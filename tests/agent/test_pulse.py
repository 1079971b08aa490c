"""When a master hangs: a number that it no longer adds to, by the clock of whoever looks."""

import pytest

from elastic.agent.pulse import EVERY, LEASES, LEAST, Pulse

LEASE = 5.0
MOST = LEASES * LEASE


class Looks:
    """A guardian's, once a second."""

    def __init__(self, lease: float = LEASE) -> None:
        self.pulse = Pulse(lease)
        self.now = 1e6

    def seconds(self, count: float, *, beating: bool = False) -> bool:
        """Whether it hangs at one of so many looks."""
        found = False
        for _ in range(int(count)):
            self.now += EVERY
            if beating:
                self.pulse.beat()
            found = self.pulse.hangs(self.now) or found
        return found


def test_a_master_that_beats_does_not_hang_and_one_that_stops_does() -> None:
    looks = Looks()
    assert not looks.seconds(100, beating=True)
    assert not looks.seconds(MOST)
    assert looks.seconds(1)


def test_a_master_that_is_late_does_not_hang() -> None:
    looks = Looks()
    for _ in range(3):
        assert not looks.seconds(1, beating=True)
        assert not looks.seconds(MOST)


def test_a_life_that_starts_is_waited_for_and_so_is_the_next() -> None:
    looks = Looks()
    assert not looks.seconds(10 * MOST)
    assert not looks.seconds(1, beating=True)
    assert looks.seconds(MOST + 1)
    looks.pulse.begin()
    assert not looks.seconds(10 * MOST)


@pytest.mark.parametrize("away", [MOST + 1, 3600.0, 1e6])
def test_a_machine_that_stood_still_is_not_the_masters_silence(away: float) -> None:
    """Whoever looks stood still, too; a master that goes on beats before long."""
    looks = Looks()
    assert not looks.seconds(5, beating=True)
    looks.now += away
    assert not looks.seconds(MOST / 2)
    assert not looks.seconds(1, beating=True)


@pytest.mark.parametrize(
    ("lease", "most"), [(0.01, LEAST), (4.0, 24.0), (5.0, 30.0), (60.0, 360.0)]
)
def test_how_long_it_may_be_silent(lease: float, most: float) -> None:
    assert Pulse(lease).most == pytest.approx(most)
