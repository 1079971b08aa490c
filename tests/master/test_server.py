"""The master over real sockets: who is let in, and who is turned away in a sentence."""

import asyncio
import contextlib
import gc
import random
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from benchmarks import wire
from elastic.master.main import serve
from elastic.master.policy import Policy
from elastic.proto import job_folder, version
from elastic.proto import master_pb2 as pb
from elastic.proto.calls import MasterClient
from elastic.proto.errors import ElasticError, MasterRefused
from elastic.proto.limits import MAX_REQUEST
from elastic.proto.security import Security
from tests.master.serving import (
    ROOT,
    Agent,
    master,
    may_unshare,
    node_states,
    noted,
    reserved,
    settings_of,
    within,
)

RUN, EXIT = pb.Directive.RUN, pb.Directive.EXIT
RUNNING, FINISHED = pb.NodeReport.RUNNING, pb.NodeReport.FINISHED

TWO = Policy(min_nodes=2, max_nodes=2)


async def serves(address: str, security: Security | None = None) -> None:
    """It still takes a node in and starts a round."""
    async with Agent(address, "node-healthy", security=security or Security()) as agent:
        await agent.ordered(RUN)


# --- in ----------------------------------------------------------------------------------------


@within(60)
async def test_one_that_is_cancelled_as_it_begins_leaves_nothing_behind(tmp_path: Path) -> None:
    """After each of its turns: the next one on the same journal begins, and nothing fails where nobody waits for it."""
    said: list[dict[str, Any]] = []
    with reserved() as address:
        for turns in count(1):
            serving = asyncio.create_task(serve(settings_of(tmp_path, address)))
            for _ in range(turns):
                await asyncio.sleep(0)
            begun = job_folder.read_note(tmp_path) is not None
            asyncio.get_running_loop().set_exception_handler(lambda _, what: said.append(what))
            serving.cancel()
            await asyncio.wait([serving])
            assert serving.cancelled(), turns
            if begun:
                break
    await asyncio.sleep(0)
    gc.collect()
    assert turns > 1
    assert said == []


@within(120)
async def test_hello_then_welcome_then_directive(tmp_path: Path) -> None:
    async with master(tmp_path) as address, Agent(address, slots=4) as agent:
        assert agent.welcome.epoch == 1
        assert agent.welcome.job_uid
        assert agent.welcome.heartbeat_interval == 1.0
        order = await agent.ordered(RUN)
        assert (order.round, order.world_size, order.local_world_size) == (1, 4, 4)
        assert order.store == agent.hello.spare_store


@within(120)
async def test_a_world_of_two_and_its_end(tmp_path: Path) -> None:
    async with (
        master(tmp_path, policy=TWO) as address,
        Agent(address, "node-a") as a,
        Agent(address, "node-b") as b,
    ):
        orders = [await agent.ordered(RUN) for agent in (a, b)]
        assert [order.node_rank for order in orders] == [0, 1]
        assert {order.num_nodes for order in orders} == {2}
        for agent in (a, b):
            await agent.report(FINISHED, 1)
        for agent in (a, b):
            assert (await agent.ordered(EXIT)).exit_code == 0


@within(120)
async def test_a_node_that_comes_again_takes_the_place_of_its_old_stream(tmp_path: Path) -> None:
    async with master(tmp_path) as address, Agent(address) as old:
        await old.ordered(RUN)
        running = pb.NodeReport(round=1, phase=RUNNING)
        async with Agent(address, report=running) as new:
            assert (await new.ordered(RUN)).round == 1
            with pytest.raises(grpc.aio.AioRpcError, match="closed this stream"):
                await old.hear()


# --- turned away -------------------------------------------------------------------------------

FAR = pb.Version(major=version.WIRE.major, minor=version.WIRE.minor + 2)


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"run_id": "other"}, "this master runs job 'job', not 'other'"),
        ({"job_uid": "f00d"}, "begun another job under the same name"),
        ({"epoch": 7}, "this master is in epoch 1, the agent has obeyed 7"),
        ({"version": FAR}, "the agent speaks version 1.2, this side 1.0"),
        ({"version": pb.Version(major=9)}, "the agent speaks version 9.0"),
        ({"node_id": ""}, "a node's name has 1 to 256 characters"),
        ({"slots": 0}, "1 to 4096 slots"),
        ({"slots": 5000}, "1 to 4096 slots"),
    ],
)
@within(120)
async def test_a_foreign_hello_is_refused_in_a_sentence(
    tmp_path: Path, hello: dict[str, Any], why: str
) -> None:
    async with master(tmp_path) as address:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with Agent(address, **hello):
                pass
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert why in (caught.value.details() or "")
        assert "\n" not in (caught.value.details() or "")
        await serves(address)


@within(120)
async def test_a_stream_begins_with_hello(tmp_path: Path) -> None:
    async with master(tmp_path) as address:
        agent = Agent(address)
        await agent.report(RUNNING, 1)
        with pytest.raises(grpc.aio.AioRpcError, match="the first message is Hello"):
            await agent.hear()
        await agent.close()
        await serves(address)


@within(120)
async def test_without_the_token_nothing_is_served(tmp_path: Path) -> None:
    security = Security(token="secret")
    async with master(tmp_path, security=security) as address:
        for wrong in (Security(), Security(token="guess")):
            with pytest.raises(grpc.aio.AioRpcError, match="wrong or missing job token"):
                async with Agent(address, security=wrong):
                    pass
            async with MasterClient(address, wrong) as client:
                for call in (client.status(), client.drain("", "mischief")):
                    with pytest.raises(MasterRefused):
                        await call
        await serves(address, security)


@within(120)
async def test_an_oversized_message_costs_its_sender_the_stream(tmp_path: Path) -> None:
    async with master(tmp_path) as address:
        large = pb.FromAgent(leaving=pb.Leaving(reason="x" * (MAX_REQUEST + 1)))
        async with Agent(address) as agent:
            await agent.ordered(RUN)
            await agent.say(leaving=large.leaving)
            with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
                await agent.ordered(EXIT)
        assert await noted(address, "is gone")
        await serves(address)


def _noise() -> list[bytes]:
    rng = random.Random(0)
    head = wire.opening() + wire.call("/elastic.v1.Master/Attach", "localhost")
    hello = wire.message(b"\x0a\x03\x12\x01x")
    return [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        rng.randbytes(4096),
        wire.opening() + rng.randbytes(4096),
        head,
        head + hello[: len(hello) // 2],
        head + wire.message(rng.randbytes(512)),  # no protobuf
        head + wire.frame(wire.DATA, 0, wire.STREAM, b"\x01\xff\xff\xff\xff"),  # 4 GiB, compressed
        head + wire.frame(wire.DATA, 0, 7, b""),  # a stream that was never opened
    ]


@within(120)
async def test_bytes_that_are_no_call_hurt_nobody(tmp_path: Path) -> None:
    async with master(tmp_path, policy=TWO) as address, Agent(address) as bystander:
        host, _, port = address.rpartition(":")
        for noise in _noise():
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(noise)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            writer.close()
            await node_states(address)
        assert await node_states(address) == {"node-a": "spare"}
        async with Agent(address, "node-b"):
            assert (await bystander.ordered(RUN)).world_size == 2


@within(120)
async def test_messages_of_another_round_and_life_are_dropped(tmp_path: Path) -> None:
    async with master(tmp_path) as address, Agent(address) as agent:
        await agent.ordered(RUN)
        await agent.report(FINISHED, 7)
        await agent.say(heartbeat=pb.Heartbeat(round=7, ranks=[pb.RankProgress(rank=0, step=9)]))
        await agent.say(unit=pb.UnitDeclared(round=7, unit=3))
        await agent.say(spare_store=pb.SpareStore(address="127.0.0.1:2"))
        await agent.say(unit=pb.UnitDeclared(round=1, unit=1))  # as before, and of this round
        async with Agent(address, "bystander") as bystander:
            await bystander.say(unit=pb.UnitDeclared(round=1, unit=3))
            await bystander.say(heartbeat=pb.Heartbeat())
            await bystander.say(leaving=pb.Leaving(reason="all of that is taken in by now"))
            await noted(address, "taken in by now")
            await bystander.say(spare_store=pb.SpareStore(address="127.0.0.1:3"))
            await bystander.say(leaving=pb.Leaving(reason="once more, from a life that has left"))
            async with MasterClient(address, Security()) as client:
                while (status := await client.status()).stale_messages < 6:
                    pass
        assert (status.phase, status.round, status.step) == ("running", 1, 0)
        assert status.stale_messages == 6


@within(120)
async def test_status_has_the_metrics_of_the_node_with_rank_0(tmp_path: Path) -> None:
    step = '{"kind": "step", "iteration": 7}'
    async with master(tmp_path) as address, Agent(address) as agent:
        await agent.ordered(RUN)
        async with (
            Agent(address, "bystander") as bystander,
            MasterClient(address, Security()) as client,
        ):
            await bystander.say(heartbeat=pb.Heartbeat(metrics="another's"))
            ranks = [pb.RankProgress(rank=0, step=7)]
            await agent.say(heartbeat=pb.Heartbeat(round=1, ranks=ranks, metrics=step))
            while (status := await client.status()).step < 7:
                pass
            assert status.metrics_json == step


# --- TLS ---------------------------------------------------------------------------------------


def certified(folder: Path, ca: trustme.CA) -> Security:
    """Files of one side of the job."""
    folder.mkdir()
    issued = ca.issue_cert("127.0.0.1", "localhost")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return Security(
        cert=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem", token="secret"
    )


@within(120)
async def test_tls_lets_in_who_has_a_certificate_of_the_jobs_authority(tmp_path: Path) -> None:
    ours = trustme.CA()
    security = certified(tmp_path / "master", ours)
    node = certified(tmp_path / "node", ours)
    stranger = certified(tmp_path / "stranger", trustme.CA())
    async with master(tmp_path / "run", security=security) as address:
        for wrong in (stranger, Security(token="secret")):
            async with MasterClient(address, wrong) as client:
                with pytest.raises(ElasticError):
                    await client.status()
        await serves(address, node)


# --- administrative verbs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "near"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("::", "127.0.0.1")]
)
@within(120)
async def test_without_a_token_loopback_may_drain(tmp_path: Path, host: str, near: str) -> None:
    async with master(tmp_path, host=host) as address, Agent(address) as agent:
        await agent.ordered(RUN)
        port = address.rpartition(":")[2]
        async with MasterClient(
            f"[{near}]:{port}" if ":" in near else f"{near}:{port}", Security()
        ) as client:
            assert "maintenance" in await client.drain("", "maintenance")
        assert (await agent.ordered(EXIT)).exit_code == 213


@within(120)
async def ask_from_afar(run_dir: str, host: str) -> None:
    """Run in a network namespace: `host` is there, and is no loopback address."""
    async with master(Path(run_dir), host="0.0.0.0") as address, Agent(address) as agent:
        await agent.ordered(RUN)
        far = f"{host}:{address.rpartition(':')[2]}"
        async with MasterClient(far, Security()) as client:
            for call in (client.drain("", "mischief"), client.restart("mischief")):
                with pytest.raises(ElasticError, match="the master's own host only"):
                    await call
            assert (await client.status()).phase == "running"
    token = Security(token="t")
    async with master(Path(run_dir), host="0.0.0.0", security=token) as address:
        far = f"{host}:{address.rpartition(':')[2]}"
        async with MasterClient(far, token) as client:
            await client.drain("", "maintenance")


@pytest.mark.netns
def test_without_a_token_others_may_look_and_not_drain(tmp_path: Path) -> None:
    if not may_unshare("--net") or not shutil.which("ip"):
        pytest.skip("may not make network namespaces")
    setup = "ip link set lo up && ip address add 10.9.8.7/32 dev lo"
    program = f"from {__name__} import ask_from_afar as ask; ask({str(tmp_path)!r}, '10.9.8.7')"
    wrapper = ["unshare", "--net", "sh", "-c", f'{setup} && exec "$@"', "sh"]
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", program],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
