"""What a kubelet and Prometheus are told."""

import asyncio

import aiohttp

from elastic.k8s.kernel.health import LAG, SILENT, Cache, Durations, Health


def made(synced: bool = True, heard: float = 0.0) -> Health:
    health = Health("elasticjob_operator")
    health.watch_cache("pods", Cache(synced=lambda: synced, heard=lambda: heard))
    return health


def test_a_cache_that_hears_nothing_makes_it_unhealthy() -> None:
    assert made(heard=100).trouble(100 + SILENT) == ""
    assert made(heard=100).trouble(101 + SILENT) == "nothing was heard of pods for 301 s"
    assert made(heard=100, synced=False).trouble(1e6) == ""  # it does not work yet: not ready


def test_a_loop_that_does_not_turn_makes_it_unhealthy() -> None:
    health = made(heard=1e9)
    health._beat = 10.0
    assert health.trouble(11.0 + LAG) == ""
    assert health.trouble(12.0 + LAG) == "the event loop has not turned for 31 s"


def test_it_is_ready_once_everything_is_listed() -> None:
    assert made(synced=False).waiting() == "not listed yet: pods"
    assert made().waiting() == ""


def test_durations_are_counted_up() -> None:
    durations = Durations()
    for seconds in (0.001, 0.15, 0.2, 99):
        durations.add(seconds)
    lines = list(durations.lines("x"))
    assert 'x_bucket{le="0.1"} 1' in lines
    assert 'x_bucket{le="0.2"} 3' in lines
    assert 'x_bucket{le="+Inf"} 4' in lines
    assert lines[-2:] == ["x_sum 99.351000", "x_count 4"]


def test_it_answers_over_http() -> None:
    async def main() -> None:
        health = made(synced=False)
        health.reconciled(0.01, failed=True)
        health.gauge("leader", lambda: 1)
        async with health.serve("127.0.0.1", 0) as port, aiohttp.ClientSession() as session:

            async def get(path: str) -> tuple[int, str]:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status, await answer.text()

            assert await get("/healthz") == (200, "ok\n")
            assert await get("/readyz") == (503, "not listed yet: pods\n")
            status, text = await get("/metrics")
            assert status == 200
            assert 'elasticjob_operator_reconcile_total{result="error"} 1\n' in text
            assert "elasticjob_operator_leader 1\n" in text
            assert "elasticjob_operator_loop_lag_seconds" in text

    asyncio.run(main())
