"""The shell of `notices.py`: tells what there is to tell, a POST or a command each, and holds up nobody."""

import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit, urlunsplit

from elastic.master import notices
from elastic.master.notices import Notice
from elastic.proto.notify import is_url, variables

log = logging.getLogger(__name__)

TIMEOUT = 10.0
"""Seconds that one may take."""
LAST_PATIENCE = 5.0
"""Seconds that what is still to be told gets at the job's end."""
MOST_WAITING = 100
"""For one target; what comes beyond it is dropped."""


class Notifier:
    """A queue for each target, told in order, one at a time. Lives on the master's loop.

    targets: http or https URLs, and shell commands; environ: of the commands.
    """

    def __init__(
        self,
        targets: Sequence[str],
        run_id: str,
        environ: Mapping[str, str],
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        self._run_id = run_id
        self._environ = environ
        self._timeout = timeout
        self._queues = {target: asyncio.Queue[dict[str, Any]](MOST_WAITING) for target in targets}
        self._tasks = [asyncio.create_task(self._tell_all(target)) for target in self._queues]

    def tell(self, notice: Notice) -> None:
        """Never waits."""
        document = notices.document(notice, run_id=self._run_id, time=time.time())
        for target, queue in self._queues.items():
            try:
                queue.put_nowait(document)
            except asyncio.QueueFull:
                log.warning("%s: %s is not told, too many wait", _name(target), notice.kind)

    async def close(self, patience: float = LAST_PATIENCE) -> None:
        """Give what is still to be told some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await asyncio.gather(*(queue.join() for queue in self._queues.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for target, queue in self._queues.items():
            if count := queue.qsize():
                log.warning("%s: %d more are not told: the job is over", _name(target), count)

    async def _tell_all(self, target: str) -> None:
        queue = self._queues[target]
        while True:
            document = await queue.get()
            error = "the job is over"
            try:
                error = await self._tell(target, document)
            finally:
                if error:
                    log.warning("%s: %s is not told: %s", _name(target), document["kind"], error)
                queue.task_done()

    async def _tell(self, target: str, document: dict[str, Any]) -> str:
        """Why it could not be told; empty: it was."""
        try:
            async with asyncio.timeout(self._timeout):
                if is_url(target):
                    return await _in_thread(target, json.dumps(document).encode(), self._timeout)
                return await self._run(target, document)
        except TimeoutError:
            return f"no answer in {self._timeout:g} s"
        except OSError as error:
            return str(error)

    async def _run(self, command: str, document: dict[str, Any]) -> str:
        """Its output is not shown, its errors are; a session of its own, so that all of it can be ended."""
        try:
            process = await asyncio.create_subprocess_shell(
                command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                env={**self._environ, **variables(document)},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return str(error)
        try:
            await process.communicate(json.dumps(document).encode() + b"\n")
        except asyncio.CancelledError:
            await _end(process)
            raise
        return f"exit {process.returncode}" if process.returncode else ""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """What is posted would be lost on the way: a redirect is an error, and says so."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, body: bytes, timeout: float) -> str:
    """Why it could not be told; empty: it was."""
    url, headers = _request(url)
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"HTTP {error.code}"
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, HTTPException, ValueError) as error:
        return str(error) or type(error).__name__


def _request(url: str) -> tuple[str, dict[str, str]]:
    """Without `user:password@`, which urllib takes for a part of the host; and the headers, which have it."""
    headers = {"Content-Type": "application/json", "User-Agent": "elastic"}
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    if at:
        known = base64.b64encode(unquote_to_bytes(login)).decode()
        headers["Authorization"] = f"Basic {known}"
        url = urlunsplit(parts._replace(netloc=host))
    return url, headers


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all that it started; what no signal ends is not waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # as of sudo's
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await process.wait()


async def _in_thread(url: str, body: bytes, timeout: float) -> str:
    """Post it, in a thread that this process does not wait for at its end."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle(error: str) -> None:
        if not done.done():
            done.set_result(error)

    def run() -> None:
        error = _post(url, body, timeout)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="elastic-notify", daemon=True).start()
    found: str = await done
    return found


def _name(target: str) -> str:
    """For a log: the rest of a URL or of a command may be a secret."""
    if not is_url(target):
        return f"--notify {target.split()[0].partition('=')[0]}"
    parts = urlsplit(target)
    return f"--notify {parts.scheme}://{parts.hostname}"
