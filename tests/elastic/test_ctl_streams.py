"""`elasticctl` with an odd command line, and with an output that takes nothing."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.master.journal import Journal
from elastic.proto import master_pb2 as pb
from elastic.proto.calls import MasterClient
from elastic.proto.job_folder import JOURNAL
from tests.elastic.asking import Ask, columns, elasticctl
from tests.master.serving import NO_SECURITY, Agent, MasterProcess, ready, reserved


@pytest.fixture
def forming(tmp_path: Path) -> Iterator[str]:
    """The master's address of a job that waits for its nodes."""
    with reserved() as address, MasterProcess(tmp_path / "job", address) as process:
        asyncio.run(process.said("job begins"))
        asyncio.run(ready(address))
        yield address


def test_a_restart_of_nothing(forming: str, ask: Ask) -> None:
    answer = ask("--master", forming, "restart", "--reason", "impatience")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == "elasticctl: nothing runs that could be restarted\n"


NO_TEXT = os.fsdecode(b"\xff")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("drain", ""), "argument NODE: it is empty: leave it out to drain the whole job"),
        (("drain", NO_TEXT), "argument NODE: it is no text"),
        (("drain", "--reason", NO_TEXT), "argument --reason: it is no text"),
        (("restart", "--reason", NO_TEXT), "argument --reason: it is no text"),
        (("--master", f"{NO_TEXT}:1", "status"), "argument --master: it is no text"),
    ],
)
def test_what_is_refused(forming: str, ask: Ask, args: tuple[str, ...], said: str) -> None:
    answer = ask("--master", forming, *args)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err.splitlines()[-1]
    assert ask("--master", forming, "status").out.split()[9] == "forming"


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (">/dev/full", "elasticctl: the answer cannot be written: No space left on device\n"),
        (">&-", "elasticctl: standard output is closed\n"),
        (">/dev/full 2>&-", ""),
        (">&- 2>&-", ""),
    ],
)
@pytest.mark.parametrize("verb", ["status", "events", "logs"])
def test_an_output_that_takes_nothing(tmp_path: Path, verb: str, to: str, said: str) -> None:
    log = tmp_path / "attempt_0" / "0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text("a line\n")
    journal = Journal(tmp_path / JOURNAL)
    journal.note(wall=1.0, job=0.0, kind="Tick", reason="a note")
    journal.close()
    command = ["sh", "-c", f'exec "$@" {to}', "sh", *elasticctl("--dir", str(tmp_path), verb)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(said)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_stale_messages_are_shown(forming: str, ask: Ask) -> None:
    """Where there are any."""
    assert "STALE" not in ask("--master", forming, "status").lines[0]
    assert json.loads(ask("--master", forming, "-o", "json", "status").out)["stale_messages"] == 0

    async def speak_of_a_round_that_never_was() -> None:
        async with Agent(forming) as agent, MasterClient(forming, NO_SECURITY) as client:
            await agent.ordered(pb.Directive.RUN)
            await agent.report(pb.NodeReport.FINISHED, 7)
            while not (await client.status()).stale_messages:
                pass

    asyncio.run(speak_of_a_round_that_never_was())
    head, line = ask("--master", forming, "status").lines[:2]
    assert (columns(head)[-1], columns(line)[-1]) == ("STALE", "1")
    assert json.loads(ask("--master", forming, "-o", "json", "status").out)["stale_messages"] == 1
