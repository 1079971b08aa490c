"""Which strike of the OOM killer may have ended a rank: counts and a clock by hand."""

from elastic.agent.oom import AGE, Strikes


def test_a_strike_of_long_ago_ended_nobody() -> None:
    count, now = 3, 100.0
    strikes = Strikes(lambda: count, lambda: now)
    assert not strikes.recent, "those were before"
    count = 4
    assert strikes.recent
    now += AGE
    assert not strikes.recent
    count, now = 5, now + 1
    strikes.look()
    now += AGE / 2
    assert strikes.recent
