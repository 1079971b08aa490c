"""The vault: what an agent keeps outlives it, whatever ends it, and costs nobody more than it must."""

import gc
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from elastic.agent.snapshots import vault
from elastic.agent.snapshots.vault import Vault


@pytest.fixture
def kept() -> Iterator[Vault]:
    made = Vault()
    yield made
    close(made)


def close(made: Vault) -> None:
    for fd in made.kept.values():
        os.close(fd)
    made.kept.clear()
    made._guardian.close()
    made._agent.close()


def memory(text: str) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    return fd


def text(fd: int) -> str:
    return os.pread(fd, 4096, 0).decode()


def fork(run: Callable[[], None]) -> int:
    """A fork that does this, and ends with 0 if it could."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)  # pytest's own code must not go on here
    return pid


def child(run: Callable[[], None]) -> int:
    """How such a fork ends."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(run), 0)[1])


def descriptors() -> int:
    """Of memory like that which is kept: what else this process has is other tests'."""
    gc.collect()
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("/memfd:") for link in links if os.path.islink(link))


def test_what_an_agent_keeps_reaches_the_guardian(kept: Vault) -> None:
    def agent() -> None:
        kept.keep("1/0/ö", memory("one"))
        kept.keep("2/1/a", memory("two"))
        assert sorted(kept.kept) == ["1/0/ö", "2/1/a"]

    assert child(agent) == 0
    assert select.select([kept], [], [], 60)[0]
    kept.take()
    assert {name: text(fd) for name, fd in kept.kept.items()} == {"1/0/ö": "one", "2/1/a": "two"}
    assert not any(os.get_inheritable(fd) for fd in kept.kept.values()), "no program inherits it"


def test_what_it_kept_last_outlives_a_sigkill(kept: Vault) -> None:
    def agent() -> None:
        kept.keep("1", memory("last"))
        os.kill(os.getpid(), signal.SIGKILL)

    assert child(agent) == -signal.SIGKILL
    kept.take()
    assert text(kept.kept["1"]) == "last"


def test_a_fork_made_later_has_all_that_is_kept(kept: Vault) -> None:
    assert child(lambda: kept.keep("1", memory("one"))) == 0
    kept.take()

    def next_life() -> None:
        assert text(kept.kept["1"]) == "one"
        kept.keep("2", memory("two"))
        kept.drop("1")
        assert list(kept.kept) == ["2"]

    assert child(next_life) == 0
    kept.take()
    assert [text(fd) for fd in kept.kept.values()] == ["two"]


def test_what_is_dropped_is_closed_on_both_sides(kept: Vault) -> None:
    before = descriptors()

    def agent() -> None:
        open_here = descriptors()
        kept.keep("1", memory("one"))
        kept.drop("1")
        assert descriptors() == open_here

    assert child(agent) == 0
    kept.take()
    assert kept.kept == {}
    assert descriptors() == before


def test_what_is_kept_by_a_name_that_is_taken_replaces_what_had_it(kept: Vault) -> None:
    before = descriptors()

    def agent() -> None:
        kept.keep("1", memory("old"))
        open_here = descriptors()
        kept.keep("1", memory("new"))
        assert descriptors() == open_here

    assert child(agent) == 0
    kept.take()
    assert [text(fd) for fd in kept.kept.values()] == ["new"]
    assert descriptors() == before + 1


def test_a_guardian_that_has_no_descriptor_left_goes_on(kept: Vault) -> None:
    message = json.dumps({"keep": "1"}).encode()
    kept._agent.send(message)  # as the kernel delivers it where there is none left for its memfd
    kept._agent.send(json.dumps({"drop": "1"}).encode())
    kept.take()
    assert kept.kept == {}


def test_a_thousand_are_kept_while_the_guardian_takes(kept: Vault) -> None:
    def agent() -> None:
        shared = memory("shared")
        for number in range(1000):
            kept.keep(str(number), os.dup(shared))
            if number % 2:
                kept.drop(str(number))

    pid = fork(agent)
    ended = os.pidfd_open(pid)
    ends: list[int] = [kept.fileno(), ended]
    while ended not in (ready := select.select(ends, [], [], 60)[0]):
        assert ready, "nothing comes"
        kept.take()
    os.close(ended)
    assert os.waitpid(pid, 0)[1] == 0
    kept.take()
    assert sorted(map(int, kept.kept)) == list(range(0, 1000, 2))
    assert {text(fd) for fd in kept.kept.values()} == {"shared"}


def test_a_guardian_that_takes_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault, "TIMEOUT", 0.05)
    made = Vault()
    before = descriptors()

    def fill() -> None:
        for number in range(100_000):
            made.keep(str(number), memory("more"))

    with pytest.raises(TimeoutError):
        fill()
    assert descriptors() == before + len(made.kept), "what is not kept is closed"
    close(made)


def test_what_is_dropped_waits_for_nobody_and_is_told_with_the_next(
    kept: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vault, "TIMEOUT", 3600.0)
    for name in ("1", "2"):
        kept.keep(name, memory("x"))

    def fill() -> None:
        while True:
            kept._agent.send(b'{"drop": "nothing"}')

    with pytest.raises(BlockingIOError):
        fill()
    kept.drop("1")
    kept.take()
    kept.drop("2")
    told = [json.loads(kept._guardian.recv(100)) for _ in range(2)]
    assert told == [{"drop": "1"}, {"drop": "2"}]


@pytest.mark.parametrize(("length", "fits"), [(20_000, True), (70_000, False)])
def test_a_long_name_is_kept_or_refused(kept: Vault, length: int, fits: bool) -> None:
    before = descriptors()
    name = "n" * length

    def agent() -> None:
        if fits:
            kept.keep(name, memory("one"))
            return
        open_here = descriptors()
        with pytest.raises(OSError, match="too long"):
            kept.keep(name, memory("one"))
        assert descriptors() == open_here

    assert child(agent) == 0
    kept.take()
    assert list(kept.kept) == ([name] if fits else [])
    assert descriptors() == before + fits


def test_its_ends_are_inherited_by_forks_and_no_program(kept: Vault) -> None:
    assert isinstance(kept._agent, socket.socket)
    assert not os.get_inheritable(kept.fileno())
    assert not os.get_inheritable(kept._agent.fileno())
