"""`elasticctl logs`: what a rank wrote, from the job's folder where it is at hand, else by way of the
master from the node that has it.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from elastic.agent.logs.reader import CHUNK, attempts, log_file
from elastic.proto import job_folder, verbs
from elastic.proto import master_pb2 as pb
from elastic.proto.calls import MasterClient
from elastic.proto.errors import MasterUnreachable, NotFound, UsageError
from elastic.proto.verbs import Context, Output

LINE_GUESS = 256
"""Bytes of a line, for the first guess at how many make a --tail."""
POLL = 0.1
"""Seconds between looks at a file that is followed."""


def logs(context: Context, argv: Sequence[str]) -> int:
    """What a rank wrote to its log files; -o json writes one object a line."""
    args = _arguments(argv)
    job, out = context.find(past=not args.follow), context.out
    if job.status is not None:
        _check(job.status, args)
    sink = _Sink(out, args.rank, args.stream)
    path = _local(job, args)
    work = _remote(job, args, sink) if path is None else _from_file(job, args, path, sink, out)
    asyncio.run(work)
    sink.end()
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="elasticctl logs", description=logs.__doc__)
    parser.add_argument("--rank", type=verbs.count, default=0, metavar="N", help="global rank (0)")
    parser.add_argument(
        "--attempt", type=verbs.count, metavar="K", help="number of the start, from 0 (the newest)"
    )
    parser.add_argument(
        "--stream", choices=("stdout", "stderr"), default="stdout", help="which one (stdout)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    parser.add_argument("--tail", type=verbs.count, metavar="N", help="the last N lines only (all)")
    return parser.parse_args(argv)


def _check(status: pb.Status, args: argparse.Namespace) -> None:
    """Raise NotFound for what cannot be there, whatever node is asked."""
    newest = status.round - 1
    if newest < 0:
        raise NotFound("nothing was started yet: `elasticctl events --follow` tells when")
    if args.attempt is not None and args.attempt > newest:
        raise NotFound(f"there is no attempt {args.attempt} yet: the newest is {newest}")
    if args.attempt in (None, newest) and 0 < status.world_size <= args.rank:
        raise NotFound(f"there is no rank {args.rank}: the world has 0 to {status.world_size - 1}")


# --- from the folder -----------------------------------------------------------------------------


def _local(job: verbs.Job, args: argparse.Namespace) -> Path | None:
    """The file in the job's folder; None where it is another node's. Raises NotFound."""
    folder = job.folder
    if folder is None:
        return None
    attempt = args.attempt
    if attempt is None and job.status is not None and job.status.round:
        attempt = job.status.round - 1  # an older one of that rank may lie here: not what is meant
    try:
        return log_file(folder, args.rank, attempt, args.stream)
    except UsageError as error:
        if job.status is not None and not _has(folder, attempt, args.rank):
            return None
        raise _explain(folder, args, str(error)) from error


def _has(folder: Path, attempt: int | None, rank: int) -> bool:
    return (folder / f"attempt_{attempt}" / str(rank)).is_dir()


def _explain(folder: Path, args: argparse.Namespace, otherwise: str) -> NotFound:
    """Why a file is not there, in one sentence."""
    found = attempts(folder)
    if not found:
        return NotFound(f"{folder} has no logs: nothing was started, or --log-dir was /dev/null")
    if args.attempt is not None and args.attempt not in found:
        known = ", ".join(map(str, found[-20:]))
        return NotFound(f"there is no attempt {args.attempt} here: there are {known}")
    newest = found[-1] if args.attempt is None else args.attempt
    ranks = sorted(
        int(entry.name)
        for entry in (folder / f"attempt_{newest}").iterdir()
        if entry.name.isdecimal()
    )
    if ranks and args.rank not in ranks:
        span = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"only {ranks[0]}"
        return NotFound(f"attempt {newest} had no rank {args.rank} here: there is {span}")
    if not ranks:
        return NotFound(otherwise)
    return NotFound(
        f"the {args.stream} of rank {args.rank} went to the console, not to a file: start the job "
        "with --tee 3 (console and files) or --redirects 3 (files)"
    )


async def _from_file(
    job: verbs.Job, args: argparse.Namespace, path: Path, sink: "_Sink", out: Output
) -> None:
    """Copy the file; with --follow also what comes, and the attempts that come after it."""
    assert job.folder is not None
    lines = args.tail
    while True:
        with path.open("rb") as file:
            _seek(file, lines)
            newer = None
            while newer is None:
                last = not args.follow or job.status is None or _is_over(job.folder)
                newer = _newer(job.folder, args, path) if args.attempt is None else None
                while data := file.read(CHUNK):  # after the looks above, so that nothing is missed
                    sink.take(data)
                if last:
                    return
                if newer is None:
                    await asyncio.sleep(POLL)
        path, lines = newer, None
        out.note(f"the ranks were started again: this is attempt {_attempt(path)}")


def _is_over(folder: Path) -> bool:
    return job_folder.read_report(folder) is not None


def _attempt(path: Path) -> int:
    return int(path.parent.parent.name.partition("_")[2])


def _newer(folder: Path, args: argparse.Namespace, path: Path) -> Path | None:
    """The same stream of the next attempt that has it."""
    for number in attempts(folder):
        if number > _attempt(path):
            found = folder / f"attempt_{number}" / str(args.rank) / path.name
            if found.is_file():
                return found
    return None


def _seek(file: BinaryIO, lines: int | None) -> None:
    """To where the last `lines` lines begin, or to the beginning."""
    end = os.fstat(file.fileno()).st_size
    try:
        first = os.lseek(
            file.fileno(), 0, os.SEEK_DATA
        )  # what was given back to the disk is a hole
    except OSError:
        first = 0
    start = first if lines is None else end
    if lines:
        wanted = lines
        for block_start, block in _blocks_backwards(file, first, end):
            count = block.count(b"\n", 0, len(block) - (block_start + len(block) == end))
            if count >= wanted:
                start = block_start + _nth_last(block.removesuffix(b"\n"), wanted) + 1
                break
            wanted, start = wanted - count, block_start
    file.seek(start)


def _blocks_backwards(file: BinaryIO, first: int, end: int) -> Iterator[tuple[int, bytes]]:
    while end > first:
        start = max(first, end - CHUNK)
        file.seek(start)
        yield start, file.read(end - start)
        end = start


# --- through the master --------------------------------------------------------------------------


async def _remote(job: verbs.Job, args: argparse.Namespace, sink: "_Sink") -> None:
    """From the node that runs the rank; with --follow until the job is over."""
    async with MasterClient(job.master, job.security) as master:
        size = skipping = 0
        if args.tail is not None:
            size, tail = await _find_tail(master, args)
            if not args.follow:
                sink.take(_last_lines(tail, args.tail))
                return
            skipping = len(tail)
        held = b""
        try:
            async for data in _chunks(master, args, tail_bytes=size, follow=args.follow):
                if not skipping:
                    sink.take(data)
                    continue
                held += data  # what was there at the start: cut to its last lines
                if len(held) >= skipping:
                    sink.take(_last_lines(held[:skipping], args.tail) + held[skipping:])
                    skipping, held = 0, b""
            sink.take(_last_lines(held, args.tail) if skipping else held)
        except MasterUnreachable:
            if not args.follow:
                raise


async def _find_tail(master: MasterClient, args: argparse.Namespace) -> tuple[int, bytes]:
    """The last bytes, with at least the lines asked for, and how many to ask for; 0: all."""
    size = max(4096, args.tail * LINE_GUESS)
    while True:
        data = b"".join([d async for d in _chunks(master, args, tail_bytes=size, follow=False)])
        if len(data) < size:
            return 0, data
        if data.count(b"\n") > args.tail:
            return size, data
        size *= 4


async def _chunks(
    master: MasterClient, args: argparse.Namespace, *, tail_bytes: int, follow: bool
) -> AsyncIterator[bytes]:
    request = pb.ReadLogRequest(
        rank=args.rank,
        attempt=args.attempt,
        stream=args.stream,
        follow=follow,
        tail_bytes=tail_bytes,
    )
    async for chunk in master.read_log(request):
        if chunk.error:
            raise NotFound(chunk.error)
        yield chunk.data


def _last_lines(data: bytes, lines: int) -> bytes:
    """The last `lines` of them; all of `data` where it has fewer."""
    return data[_nth_last(data.removesuffix(b"\n"), lines) + 1 :] if lines else b""


def _nth_last(data: bytes, nth: int) -> int:
    """Where the nth newline from the end is; -1 where there are fewer."""
    at = len(data)
    for _ in range(nth):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return -1
    return at


# --- out -----------------------------------------------------------------------------------------


class _Sink:
    """Bytes as they come, or whole lines as JSON."""

    def __init__(self, out: Output, rank: int, stream: str) -> None:
        self._out = out
        self._about = {"rank": rank, "stream": stream}
        self._rest = b""

    def take(self, data: bytes) -> None:
        if not self._out.json:
            self._out.raw(data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)

    def end(self) -> None:
        if self._rest:
            self._line(self._rest)

    def _line(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._out.document({**self._about, "line": text}, line=True)
