"""Whether a GPU is slow or its host."""

from dataclasses import replace
from math import isnan

from hypothesis import given
from hypothesis import strategies as st

from elastic.master.devices import Usual, is_host
from elastic.master.intervals import Times


@given(st.floats(0.001, 10.0), st.floats(1.1, 3.0), st.floats(0.2, 0.8))
def test_who_is_slow_in_all_that_it_does_is_slow_on_its_device(
    compute: float, factor: float, share: float
) -> None:
    peers = Usual(compute, share * compute)
    slow = on_device(factor * compute, factor * share * compute)
    assert is_host(slow, [peers], 0.06) == 0
    assert is_host(replace(slow, backward=share * compute), [peers], 0.06) == 1
    assert is_host(replace(slow, starved=True), [peers], 0.06) == 1
    assert isnan(is_host(slow, [Usual(compute, 0.0)], 0.06)), "no backward pass is seen"


@given(st.floats(1.05, 1.5), st.floats(0.8, 1.0), st.floats(0.2, 0.8), st.floats(1.05, 3.0))
def test_peers_that_wait_and_become_faster_make_no_device_slow(
    factor: float, peers: float, share: float, work: float
) -> None:
    """Nor does a step that has become longer, for all, hide it."""
    before, others = Usual(1.0, share), Usual(peers, peers * share)
    late, slow = on_device(factor, share), on_device(factor, factor * share)
    assert is_host(late, [others, before], 0.06) == 1
    assert is_host(slow, [others, before], 0.06) == 0
    late, slow = (
        on_device(work * factor, work * share),
        on_device(work * factor, work * factor * share),
    )
    assert is_host(late, [Usual(work, work * share), before], 0.06) == 1
    assert is_host(slow, [Usual(work, work * share), before], 0.06) == 0


def on_device(compute: float, backward: float) -> Times:
    return Times(compute=compute, waiting=0.0, least=0.0, backward=backward)
