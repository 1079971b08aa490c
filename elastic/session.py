"""A rank's link to its agent, for scripts that have something to say. Needs no torch.

    from elastic import session

    session.declare_rank_unit(2)     # before any process group: this script needs pairs of ranks
    for number in range(start, total):
        train(number)
        session.step(number + 1)     # the step that is now finished

Every call does nothing, and costs next to nothing, in a process that `elastic-run` did not start,
and in the children of a rank.
"""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.agent import hook
from elastic.proto import env
from elastic.proto.errors import LinkError, UsageError
from elastic.proto.link import (
    LINE_LIMIT,
    FirstStep,
    KeeperAsked,
    Parser,
    UnitAnswered,
    UnitAsked,
)

ANSWER_TIMEOUT = 60.0
"""Seconds that the agent has to answer."""
MOST_ARGUMENT = 1 << 16
"""Bytes that a rehearsal may be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Who this rank is, in which round. All of it stays as it is while the process lives."""

    job: str
    """Its name."""
    uid: str
    """The job's own id, which no other job of its name has."""
    launch: str
    """Of the job's command: another each time that it is given, and the job goes on. Empty: it is not known."""
    node: str
    round: int
    """Grows by one or more each time that the ranks are started anew."""
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def current() -> Session | None:
    """This process's session; None outside `elastic-run`."""
    variables = env.process_environment()
    try:
        job, node, number = variables[env.MARK].rsplit("/", 2)
        return Session(
            job=job,
            uid=variables[env.JOB],
            launch=variables.get(env.LAUNCH, ""),
            node=node,
            round=int(number),
            rank=int(variables["RANK"]),
            local_rank=int(variables["LOCAL_RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
        )
    except (KeyError, ValueError):
        return None


def step(number: int) -> None:
    """Tell that step `number` has finished (an optimizer step, counted from 1)."""
    attachment = hook.attach()
    if attachment is not None:
        attachment.page.step(number)
        if not attachment.told_step:  # the end of a recovery: the agent should not have to look
            attachment.told_step = True
            attachment.send(FirstStep(step=number))


def phase(name: str) -> None:
    """Tell what the script does now, such as "evaluate": a long one is then not taken for a hang.

    Names have up to 56 bytes; "" goes back to plain training.
    """
    attachment = hook.attach()
    if attachment is not None:
        attachment.page.phase(name)


@contextlib.contextmanager
def in_phase(name: str) -> Iterator[None]:
    """The same as long as a block lasts; what was told before holds again after it."""
    attachment = hook.attach()
    if attachment is None:
        yield
        return
    before = attachment.page.progress().phase
    attachment.page.phase(name)
    try:
        yield
    finally:
        attachment.page.phase(before)


def declare_rank_unit(ranks: int) -> None:
    """Say that the world must be a multiple of `ranks`; call it before making a process group.

    Waits for the agent's answer. Where the world is no such multiple, raises `UsageError`: end the
    process then; a legal world is formed at once, and this start is not counted. Raises `LinkError`
    when no answer comes within `ANSWER_TIMEOUT` seconds.
    """
    if ranks < 1:
        raise UsageError(f"declare_rank_unit takes 1 or more ranks, not {ranks}")
    attachment = hook.attach()
    link = None if attachment is None else attachment.open_link()
    if attachment is None or link is None:
        return
    with link:
        if not attachment.send(UnitAsked(ranks=ranks)):
            raise LinkError("the agent did not take what this rank needs")
        answer = _wait_for_answer(link)
    if answer.reason:
        raise UsageError(answer.reason)


def set_rehearsal(function: str, argument: str) -> None:
    """Say what a spare of this rank does before it is needed, such as to trace what the rank compiles: call
    `function`, as in "package.module:function", with `argument` (`MOST_ARGUMENT` bytes at most) and its device, as
    "cuda:0". docs/rehearsals.md says how such a function is written.

    The last call before the first step counts. Raises `UsageError` where a spare could make nothing of it.
    """
    module, _, name = function.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise UsageError(f'set_rehearsal takes "package.module:function", not {function!r}')
    if len(argument.encode(errors="surrogatepass")) > MOST_ARGUMENT:
        raise UsageError(f"set_rehearsal takes an argument of up to {MOST_ARGUMENT} bytes")
    attachment = hook.attach()
    if attachment is not None:
        attachment.rehearsal = (function, argument)


def open_keeper() -> socket.socket | None:
    """A connection to what keeps this rank's snapshots (`proto/keeper.py`); None outside `elastic-run`.

    Raises `LinkError` where the agent does not take it.
    """
    attachment = hook.attach()
    if attachment is None:
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        if attachment.send(KeeperAsked(), (theirs.fileno(),)):
            return ours
    ours.close()
    raise LinkError("the agent did not take this rank's checkpointer")


def _wait_for_answer(link: socket.socket) -> UnitAnswered:
    parser = Parser()
    link.settimeout(ANSWER_TIMEOUT)
    while True:
        try:
            data = link.recv(LINE_LIMIT)
        except OSError as error:
            raise LinkError("the agent did not answer what this rank needs") from error
        if not data:
            raise LinkError("the agent closed this rank's link")
        for message in parser.feed(data):
            if isinstance(message, UnitAnswered):
                return message
