"""Telling a real server on loopback and real commands; what does not answer holds up nobody."""

import base64
import contextlib
import json
import os
import select
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic.master.notices import Notice
from elastic.master.notify import MOST_WAITING, Notifier
from tests.master.serving import within

HANG = Notice(kind="hang", reason="rank 1 is stopped", ranks=(1,))
END = Notice(kind="job_succeeded", reason="its node finished")
ENOUGH = 60.0
"""Seconds; nothing waits for their end."""


class Web:
    """What a server was posted; status: what it answers."""

    def __init__(self, status: int = 200, before: Callable[[], object] = lambda: None) -> None:
        self.posted: list[tuple[str, Any]] = []
        self.logins: list[str | None] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                web.logins.append(self.headers["Authorization"])
                web.posted.append((self.headers["Content-Type"], json.loads(body)))
                before()
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret"


@contextlib.contextmanager
def served(web: Web) -> Iterator[Web]:
    thread = threading.Thread(target=web.server.serve_forever)
    thread.start()
    try:
        yield web
    finally:
        web.server.shutdown()
        thread.join()
        web.server.server_close()


@contextlib.asynccontextmanager
async def notifier(
    *targets: str, timeout: float = ENOUGH, patience: float = ENOUGH
) -> AsyncIterator[Notifier]:
    made = Notifier(targets, "job", {"PATH": os.environ["PATH"]}, timeout=timeout)
    yield made
    await made.close(patience)


@within(120)
async def test_a_url_is_posted_one_object_each(caplog: pytest.LogCaptureFixture) -> None:
    with served(Web()) as web:
        async with notifier(web.url) as to:
            to.tell(HANG)
            to.tell(END)
    assert [kind for kind, _ in web.posted] == ["application/json"] * 2
    first, last = (body for _, body in web.posted)
    assert first.pop("time") > 0
    assert first == {
        "run_id": "job", "kind": "hang", "reason": "rank 1 is stopped", "nodes": [], "ranks": [1], "detail": {},
    }  # fmt: skip
    assert last["kind"] == "job_succeeded"
    assert not caplog.records


@within(120)
async def test_a_login_in_a_url_is_sent_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with served(Web()) as web:
        async with notifier(web.url.replace("http://", "http://me:se%40cret@")) as to:
            to.tell(HANG)
    assert web.logins == [f"Basic {base64.b64encode(b'me:se@cret').decode()}"]
    async with notifier("http://me:secret@127.0.0.1:9/") as to:
        to.tell(HANG)
    (line,) = caplog.messages
    assert line.startswith("--notify http://127.0.0.1: hang is not told: [Errno 111]"), line


@pytest.mark.parametrize("status", [302, 500])
def test_a_server_that_does_not_take_it_is_one_line_without_the_secret(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    @within(120)
    async def run() -> None:
        with served(Web(status)) as web:
            async with notifier(web.url) as to:
                to.tell(HANG)

    run()
    assert caplog.messages == [f"--notify http://127.0.0.1: hang is not told: HTTP {status}"]


@within(120)
async def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    async with notifier("http://127.0.0.1:9/") as to:
        to.tell(HANG)
    (line,) = caplog.messages
    assert "is not told: [Errno 111] Connection refused" in line


@within(120)
async def test_a_server_that_never_answers_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()
    with served(Web(before=over.wait)) as web:
        async with notifier(web.url, timeout=0.2) as to:
            to.tell(HANG)
        over.set()
    assert caplog.messages == ["--notify http://127.0.0.1: hang is not told: no answer in 0.2 s"]


@within(120)
async def test_a_command_gets_it_on_stdin_and_in_its_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    show = f'(cat; echo "$ELASTIC_KIND|$ELASTIC_RUN_ID|$ELASTIC_REASON") >> {out}'
    async with notifier(show) as to:
        to.tell(HANG)
        to.tell(END)
    body, variables, last, _ = out.read_text().splitlines()
    assert json.loads(body)["ranks"] == [1]
    assert variables == "hang|job|rank 1 is stopped"
    assert json.loads(last)["kind"] == "job_succeeded"


@within(120)
async def test_a_command_that_fails_and_one_that_takes_no_input(
    caplog: pytest.LogCaptureFixture,
) -> None:
    big = Notice(kind="failure", reason="x", detail={"evidence": "x" * 1_000_000})
    async with notifier("TOKEN=secret; exit 3", "true") as to:
        to.tell(big)
    assert caplog.messages == ["--notify TOKEN: failure is not told: exit 3"]


def wait_for_the_end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        assert select.select([fd], [], [], ENOUGH)[0], "it runs on"
        os.close(fd)


@within(120)
async def test_a_command_that_hangs_is_ended_with_its_children_and_the_next_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out"
    hangs = f"[ $ELASTIC_KIND = hang ] || exec cat > {out}; sleep 1000 & echo $! $$ > {pids}; wait"
    async with notifier(hangs, timeout=5.0) as to:
        to.tell(HANG)
        to.tell(END)
    assert "hang is not told: no answer in 5 s" in caplog.messages[0]
    assert json.loads(out.read_text())["kind"] == "job_succeeded"
    for pid in map(int, pids.read_text().split()):
        wait_for_the_end(pid)


@within(120)
async def test_the_end_waits_for_what_hangs_no_longer_than_it_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with notifier("sleep 1000", patience=0.2) as to:
        for _ in range(3):
            to.tell(HANG)
    assert caplog.messages == [
        "--notify sleep: hang is not told: the job is over",
        "--notify sleep: 2 more are not told: the job is over",
    ]


@within(120)
async def test_what_is_too_much_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with notifier("sleep 1000", patience=0.0) as to:
        for _ in range(MOST_WAITING + 2):
            to.tell(HANG)
    assert caplog.messages[:2] == ["--notify sleep: hang is not told, too many wait"] * 2
