"""`elasticctl data preprocess`: loose JSON to Megatron's indexed files, by several processes.

This process reads lines and writes files, the others encode (`encoding`). Blocks come back in the order in
which they were read, so the files do not depend on how many encode, and a line that is wrong is the first
such line.
"""

import contextlib
import errno
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Self

from elastic.proto.errors import UsageError
from elastic.trainer.data import lines
from elastic.trainer.data.encoding import BadLine, Encoded, Settings, answer, send
from elastic.trainer.data.indexed import paths, token_dtype, write
from elastic.trainer.data.lines import Block
from elastic.trainer.data.tokenizers import build


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What there is so far."""

    documents: int
    tokens: int
    """Of all keys."""
    text: int
    """Bytes of text that were read."""
    read: int
    """Bytes of them on the disk, where they may be compressed."""


def outputs(prefix: str, keys: Sequence[str]) -> list[str]:
    """Prefix of each key's files, as Megatron names them."""
    return [f"{prefix}_{key}_document" for key in keys]


def preprocess(
    inputs: Sequence[Path],
    prefix: str,
    settings: Settings,
    *,
    workers: int,
    told: Callable[[Done], None] = lambda _: None,
) -> Done:
    """Write PREFIX_KEY_document.{bin,idx} for each key; there are none where it fails.

    told: hears of every block that is written. UsageError, one sentence, for what cannot be read, encoded
    or written.
    """
    tokenizer = build(settings.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    if settings.append_eod:
        tokenizer.eod  # noqa: B018 - it raises where the tokenizer names none, and now is the time to say so
    done = Done(documents=0, tokens=0, text=0, read=0)
    names = outputs(prefix, settings.keys)
    with _writing(names), ExitStack() as stack:
        writers = [stack.enter_context(write(name, dtype)) for name in names]
        blocks = stack.enter_context(closing(lines.blocks(inputs)))
        encoded = stack.enter_context(closing(_encoded(blocks, settings, workers)))
        for block, made in encoded:
            for writer, lengths, tokens in zip(writers, made.lengths, made.tokens, strict=True):
                writer.extend(lengths, tokens)
            done = Done(
                documents=done.documents + len(made.lengths[0]),
                tokens=done.tokens + sum(int(one.sum()) for one in made.lengths),
                text=done.text + len(block.text),
                read=done.read + block.read,
            )
            told(done)
        if not done.documents:
            raise UsageError(f"there is no document in {', '.join(map(str, inputs[:3]))}")
    return done


@contextlib.contextmanager
def _writing(names: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or f"{paths(names[0])[0]}"
        rest = (
            "; make room there, and start again: nothing is left of it"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else ""
        )
        raise UsageError(f"cannot write {where}: {error.strerror}{rest}") from error


def _encoded(
    blocks: Iterator[Block], settings: Settings, workers: int
) -> Generator[tuple[Block, Encoded], None, None]:
    """Blocks, each with what it became, in order."""
    with _Encoders(settings, workers) as encoders:
        coming: deque[tuple[Block, Future[Encoded]]] = deque()
        for block in blocks:
            coming.append((block, encoders.submit(block.text)))
            if len(coming) > 2 * workers:
                yield _next(coming)
        while coming:
            yield _next(coming)


def _next(coming: deque[tuple[Block, Future[Encoded]]]) -> tuple[Block, Encoded]:
    block, future = coming.popleft()
    try:
        return block, future.result()
    except BadLine as error:
        line, what = error.args
        raise UsageError(f"{block.path}, line {block.first + line}: {what}") from error


class _Encoders:
    """The processes that encode, and a thread for each that waits for it."""

    def __init__(self, settings: Settings, workers: int) -> None:
        self._keys = len(settings.keys)
        command = [sys.executable, "-m", "elastic.trainer.data.encoding", settings.to_json()]
        self._all = _started(command, workers)
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self._all:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(workers)

    def submit(self, text: bytes) -> Future[Encoded]:
        return self._threads.submit(self._run, text)

    def _run(self, text: bytes) -> Encoded:
        process = self._free.get()
        source, out = _pipes(process)
        try:
            send(source, text)
            return answer(out, self._keys)
        except (EOFError, BrokenPipeError) as error:
            code = process.wait()
            if code == -signal.SIGKILL:
                raise UsageError(
                    "a process that encodes was killed: with less memory than it needs, give --workers less"
                ) from error
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise UsageError(f"a process that encodes ended {how}: it says why above") from error
        finally:
            self._free.put(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        _kill(self._all)
        self._threads.shutdown()
        _close(self._all)


def _started(command: Sequence[str], count: int) -> "list[subprocess.Popen[bytes]]":
    found: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # ^C is for us, who end them; without us their input ends
            )
            found.append(process)
    except OSError as error:
        raise UsageError(
            f"of --workers {count}, {len(found)} could be started: {error.strerror}; give it less"
        ) from error
    finally:
        if len(found) < count:
            _kill(found)
            _close(found)
    return found


def _kill(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        process.kill()  # it has nothing that is not here, or not wanted


def _close(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        process.wait()
        for pipe in _pipes(process):
            with contextlib.suppress(BrokenPipeError):  # of what was never sent
                pipe.close()


def _pipes(process: "subprocess.Popen[bytes]") -> tuple[IO[Any], IO[Any]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout
