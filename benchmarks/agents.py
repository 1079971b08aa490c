"""Simulated agents, thousands in one process, one TCP connection each: `python -m benchmarks.agents`.

Takes commands on stdin and answers on stdout, a JSON object a line; times are monotonic seconds,
which all processes of a machine share. Between commands it sends heartbeats and acknowledges pings.
"""

import argparse
import json
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import wire
from elastic.proto import master_pb2 as pb
from elastic.proto import version

CONNECTING = 256
"""Connections that are opened at a time, well below the kernel's backlog."""
SLOTS = 8
BOUND = 120.0
"""Seconds after which a command fails."""


class Agent:
    """One connection: not yet open, open, attached, told."""

    __slots__ = ("data", "index", "inbox", "open", "socket", "told")

    def __init__(self, index: int, address: tuple[str, int]) -> None:
        self.index = index
        self.open = False
        self.told = 0
        """The round of the last directive to run."""
        self.inbox, self.data = bytearray(), bytearray()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.socket.connect_ex(address)


class Crowd:
    """All agents of this process and the loop that serves them."""

    def __init__(self, address: tuple[str, int], run_id: str) -> None:
        self._address = address
        self._call = wire.call("/elastic.v1.Master/Attach", f"{address[0]}:{address[1]}")
        self._run_id = run_id
        self._agents: dict[int, Agent] = {}
        self._poll = select.epoll()
        self._poll.register(sys.stdin.fileno(), select.EPOLLIN)
        self._attached: list[Agent] = []
        self._opened = 0
        self._round = 0
        self._told = 0
        self._last_told = 0.0
        self._interval = 0.0
        self._beaten = 0
        self._asked = False
        self.messages = 0
        """Heard from the master."""

    # --- commands -------------------------------------------------------------------------

    def connect(self, count: int) -> dict[str, float]:
        """Open `count` more connections; each is open once the master's settings came."""
        began, goal = time.monotonic(), self._opened + count
        started = self._opened
        while started < goal:
            room = min(goal, self._opened + CONNECTING)
            for _ in range(started, room):
                self._open()
            started = max(started, room)
            before = self._opened
            self._serve(lambda before=before: self._opened > before)  # type: ignore[misc]
        self._serve(lambda: self._opened == goal)
        return {"began": began, "ended": time.monotonic()}

    def attach(self, round: int) -> dict[str, float]:
        """Every open agent says Hello; returns once each was told to run `round`; 0: at once."""
        fresh = [agent for agent in self._agents.values() if agent not in set(self._attached)]
        self._expect(round)
        self._attached += fresh
        began = time.monotonic()
        for agent in fresh:
            hello = self._hello(agent.index).SerializeToString()
            agent.socket.sendall(self._call + wire.message(hello))
        return self._until_told(began, len(self._attached) if round else 0)

    def replace(self, round: int) -> dict[str, float]:
        """The connection of one agent in the middle breaks; until all others run `round`."""
        victim = self._attached.pop(len(self._attached) // 2)
        self._expect(round)
        began = time.monotonic()
        self._end(victim)
        return self._until_told(began, len(self._attached))

    def report(self, phase: int) -> dict[str, float]:
        """Every agent reports a phase of its round; returns once all was sent."""
        began = time.monotonic()
        body = pb.NodeReport(round=self._round, phase=pb.NodeReport.Phase.Name(phase))
        text = wire.message(pb.FromAgent(report=body).SerializeToString())
        for agent in self._attached:
            agent.socket.sendall(text)
        return {"began": began, "ended": time.monotonic()}

    def run(self) -> None:
        """Serve, and take commands, until stdin ends."""
        verbs: dict[str, Callable[..., dict[str, float]]] = {
            "connect": self.connect,
            "attach": self.attach,
            "replace": self.replace,
            "report": self.report,
        }
        while True:
            self._serve(lambda: self._asked, bound=None)
            self._asked = False
            line = sys.stdin.readline()
            if not line:
                return
            command: dict[str, Any] = json.loads(line)
            answer = verbs[command.pop("verb")](**command)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    # --- the loop -------------------------------------------------------------------------

    def _serve(self, done: Callable[[], bool], bound: float | None = BOUND) -> None:
        end = None if bound is None else time.monotonic() + bound
        while not done():
            now = time.monotonic()
            if end is not None and now > end:
                raise SystemExit(f"{self._told} of {len(self._attached)} told within {bound:g} s")
            self._beat(now)
            for descriptor, _ in self._poll.poll(0.01 if self._interval else 1.0, 1024):
                if descriptor == sys.stdin.fileno():
                    self._asked = True
                else:
                    self._read(self._agents[descriptor])

    def _read(self, agent: Agent) -> None:
        heard = agent.socket.recv(16_384)
        if not heard:
            raise SystemExit(f"the master closed the connection of agent {agent.index}")
        agent.inbox += heard
        for kind, flags, payload in wire.frames(agent.inbox):
            if kind == wire.DATA:
                agent.data += payload
                for body in wire.messages(agent.data):
                    self._hear(agent, pb.ToAgent.FromString(body))
            elif kind in (wire.RST_STREAM, wire.GOAWAY) or (
                kind == wire.HEADERS and flags & wire.END_STREAM
            ):
                raise SystemExit(f"the master ended the stream of agent {agent.index}: {payload!r}")
            elif reply := wire.answer(kind, flags, payload):
                if not agent.open and kind == wire.SETTINGS:
                    agent.open = True
                    self._opened += 1
                    self._poll.modify(agent.socket.fileno(), select.EPOLLIN)
                agent.socket.sendall(reply)

    def _hear(self, agent: Agent, message: pb.ToAgent) -> None:
        self.messages += 1
        if message.HasField("welcome"):
            self._interval = message.welcome.heartbeat_interval
            return
        order = message.directive
        if order.kind == pb.Directive.RUN and order.round != agent.told:
            agent.told = order.round
            self._told += order.round == self._round
            self._last_told = time.monotonic()

    def _beat(self, now: float) -> None:
        """Send the heartbeats that are due, spread evenly over the interval."""
        if not self._interval or not self._attached:
            return
        due = int(now / self._interval * len(self._attached))
        for number in range(max(self._beaten, due - len(self._attached)) if self._beaten else due, due):
            agent = self._attached[number % len(self._attached)]
            ranks = [
                pb.RankProgress(rank=agent.index * SLOTS + i, pid=1000 + i, step=0, phase="train")
                for i in range(SLOTS)
            ]
            beat = pb.Heartbeat(round=agent.told, ranks=ranks)
            agent.socket.sendall(wire.message(pb.FromAgent(heartbeat=beat).SerializeToString()))
        self._beaten = due

    # --- shared ---------------------------------------------------------------------------

    def _open(self) -> None:
        agent = Agent(len(self._agents), self._address)
        self._agents[agent.socket.fileno()] = agent
        agent.socket.setblocking(False)
        self._poll.register(agent.socket.fileno(), select.EPOLLIN)

    def _end(self, agent: Agent) -> None:
        self._poll.unregister(agent.socket.fileno())
        del self._agents[agent.socket.fileno()]
        agent.socket.close()

    def _expect(self, round: int) -> None:
        self._round, self._told = round, 0

    def _until_told(self, began: float, goal: int) -> dict[str, float]:
        self._serve(lambda: self._told >= goal)
        return {"began": began, "ended": self._last_told, "messages": self.messages}

    def _hello(self, index: int) -> pb.FromAgent:
        ip = f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}"
        return pb.FromAgent(
            hello=pb.Hello(
                version=pb.Version(major=version.WIRE.major, minor=version.WIRE.minor),
                run_id=self._run_id,
                node_id=f"node-{index:05}",
                incarnation=1_700_000_000_000 + index,
                slots=SLOTS,
                host=ip,
                knock_address="127.0.0.1:9",  # nobody listens: a broken stream is a lost node
                role="default",
                labels={"zone": f"z{index // 2048}", "rack": f"r{index // 32}"},
                spare_store=f"{ip}:29500",
            )
        )


def main() -> None:
    """Serve the agents of one master until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("run_id")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.nice(0)
    Crowd(("127.0.0.1", args.port), args.run_id).run()


if __name__ == "__main__":
    main()
