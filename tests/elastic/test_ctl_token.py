"""The job's token goes to no address that a stranger may have written."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic.proto import job_folder
from elastic.proto.security import TOKEN, TOKEN_KEY

SECRET = "open sesame"


@contextmanager
def listener(heard: list[str]) -> Iterator[str]:
    """What a stranger may serve: notes the token of each call, and wants one. Its address."""

    class Notes(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            heard.append(str(dict(details.invocation_metadata).get(TOKEN_KEY, "")))
            return grpc.unary_unary_rpc_method_handler(refuse)

    def refuse(request: object, context: Any) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "")

    server = grpc.server(ThreadPoolExecutor(1), interceptors=[Notes()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def status(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "elastic.ctl", "--dir", str(folder), "status")
    environ = {**os.environ, TOKEN: SECRET}
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.parametrize("mode", [0o755, 0o777], ids=["ours", "everybody's"])
def test_the_token_is_sent_where_only_we_can_have_written(tmp_path: Path, mode: int) -> None:
    heard: list[str] = []
    with listener(heard) as address:
        note = job_folder.MasterNote(address=address, run_id="job", pid=os.getpid())
        job_folder.write_note(tmp_path, note)
        tmp_path.chmod(mode)
        done = status(tmp_path)
    assert done.returncode == 1
    assert heard == [SECRET if mode == 0o755 else ""]
    assert ("the job's token is not sent" in done.stderr) == (mode == 0o777)
    assert "Traceback" not in done.stderr


def test_a_strangers_job_that_is_over_can_be_read(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "elastic.run", "--rdzv-backend", "c10d", "--rdzv-id", "job")
    where = ("--rdzv-endpoint", "127.0.0.1:0", "--log-dir", str(tmp_path))
    subprocess.run((*command, *where, "--no-python", "true"), timeout=150, check=True)
    folder = tmp_path / "job"
    folder.chmod(0o777)
    done = status(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "succeeded" in done.stdout
