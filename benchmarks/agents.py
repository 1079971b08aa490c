"""Simulated agents, thousands in one process, one TCP connection each: `python -m benchmarks.agents`.

Takes commands on stdin and answers on stdout, a JSON object a line; times are monotonic seconds,
which all processes of a machine share. Between commands it sends heartbeats and acknowledges pings.
"""

import argparse
import contextlib
import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import wire
from elastic.proto import knock, version
from elastic.proto import master_pb2 as pb
from elastic.proto.limits import lift_open_files

CONNECTING = 256
"""Connections that are opened at a time, well below the kernel's backlog."""
SLOTS = 8
BOUND = 120.0
"""Seconds after which a command fails."""
LOOK = 0.01
"""Seconds between looks at the clock, for heartbeats."""

Answer = dict[str, float]
"""Monotonic times: when a command began, and when what it waits for had happened."""


class Agent:
    """One connection: open, attached, told."""

    __slots__ = ("data", "inbox", "index", "open", "socket", "told")

    def __init__(self, index: int, address: tuple[str, int]) -> None:
        self.index = index
        self.open = False
        """The master's settings came."""
        self.told = 0
        """The round of the last directive to run."""
        self.inbox, self.data = bytearray(), bytearray()
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.socket.sendall(wire.opening())


class Crowd:
    """All agents of this process and the loop that serves them."""

    def __init__(self, address: tuple[str, int], run_id: str) -> None:
        self._address = address
        self._call = wire.call("/elastic.v1.Master/Attach", f"{address[0]}:{address[1]}")
        self._run_id = run_id
        self._agents: dict[int, Agent] = {}
        self._poll = select.epoll()
        self._poll.register(sys.stdin.fileno(), select.EPOLLIN)
        self._doors = socket.create_server(("0.0.0.0", 0), backlog=4096)
        """Where every agent is knocked at, each at an address of its own."""
        self._poll.register(self._doors.fileno(), select.EPOLLIN)
        self._waiting: list[Agent] = []
        self._attached: list[Agent] = []
        self._made = self._opened = 0
        self._gone = -1
        """The agent that was replaced; where it was knocked at, connections are reset."""
        self._round = 0
        self._ran = 0
        """The round that all ran when the master died; each says so in its next Hello."""
        self._told = 0
        self._lost = 0
        """Connections that the master ended."""
        self._last_told = 0.0
        self._interval = 0.0
        self._next, self._beaten = 0, time.monotonic()
        self._asked = False
        """A command waits on stdin."""

    # --- commands -------------------------------------------------------------------------

    def connect(self, count: int) -> Answer:
        """Open `count` more connections; each is open once the master's settings came."""
        began, goal = time.monotonic(), self._made + count
        while self._opened < goal:
            while self._made < min(goal, self._opened + CONNECTING):
                self._open()
            self._turn()
        return {"began": began, "ended": time.monotonic()}

    def attach(self, round: int) -> Answer:
        """Every open agent says Hello; returns once all were told to run `round`; 0: at once."""
        self._expect(round)
        began = time.monotonic()
        for agent in self._waiting:
            hello = self._hello(agent.index).SerializeToString()
            agent.socket.sendall(self._call + wire.message(hello))
        self._attached += self._waiting
        self._waiting = []
        self._beaten = max(self._beaten, began)
        return self._until_told(began, len(self._attached) if round else 0)

    def drop(self) -> Answer:
        """The master is gone: every connection ends, and every agent's ranks go on."""
        began = time.monotonic()
        for agent in tuple(self._agents.values()):
            self._end(agent)
        self._ran, self._attached = self._round, []
        self._made = self._opened = self._lost = 0
        return {"began": began, "ended": time.monotonic()}

    def replace(self, round: int) -> Answer:
        """The connection of one agent in the middle breaks; until all others run `round`."""
        victim = self._attached.pop(len(self._attached) // 2)
        self._gone = victim.index
        self._expect(round)
        began = time.monotonic()
        self._end(victim)
        return self._until_told(began, len(self._attached))

    def run(self) -> None:
        """Serve, and take commands, until stdin ends."""
        verbs: dict[str, Callable[..., Answer]] = {
            "connect": self.connect,
            "attach": self.attach,
            "drop": self.drop,
            "replace": self.replace,
        }
        while True:
            while not self._asked:
                self._turn()
            self._asked = False
            line = sys.stdin.readline()
            if not line:
                return
            command: dict[str, Any] = json.loads(line)
            answer = verbs[command.pop("verb")](**command)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    # --- the loop -------------------------------------------------------------------------

    def _turn(self) -> None:
        self._beat(time.monotonic())
        for descriptor, _ in self._poll.poll(LOOK, 1024):
            if descriptor == sys.stdin.fileno():
                self._asked = True
            elif descriptor == self._doors.fileno():
                self._answer_knock()
            else:
                self._read(self._agents[descriptor])

    def _answer_knock(self) -> None:
        caller, _ = self._doors.accept()
        with caller:
            _, *address = map(int, caller.getsockname()[0].split("."))
            index = int.from_bytes(address) - 1
            if index == self._gone:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                caller.sendall(knock.answer(_incarnation(index)))

    def _read(self, agent: Agent) -> None:
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            heard = agent.socket.recv(16_384)
        if not heard:
            self._lost += 1
            self._end(agent)
            return
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
                agent.socket.sendall(reply)

    def _hear(self, agent: Agent, message: pb.ToAgent) -> None:
        if message.HasField("welcome"):
            if not self._interval:  # an agent's first beat comes one interval after its welcome
                self._interval = message.welcome.heartbeat_interval
                self._beaten = time.monotonic() + self._interval
            return
        order = message.directive
        if order.kind == pb.Directive.RUN and order.round != agent.told:
            agent.told = order.round
            self._told += order.round == self._round
            self._last_told = time.monotonic()
            if order.node_rank == 0:  # its store is in use now; it makes another
                self._say(
                    agent,
                    pb.FromAgent(
                        spare_store=pb.SpareStore(address=f"10.0.0.1:{29500 + order.round}")
                    ),
                )

    def _beat(self, now: float) -> None:
        """Send the heartbeats that are due, spread evenly over the interval."""
        if not self._interval or not self._attached:
            return
        pause = self._interval / len(self._attached)
        while self._beaten + pause <= now:
            agent = self._attached[self._next % len(self._attached)]
            ranks = [
                pb.RankProgress(rank=agent.index * SLOTS + i, pid=1000 + i, phase="train")
                for i in range(SLOTS)
            ]
            beat = pb.Heartbeat(round=agent.told, ranks=ranks)
            self._say(agent, pb.FromAgent(heartbeat=beat))
            self._next = (self._next + 1) % len(self._attached)
            self._beaten += pause

    def _say(self, agent: Agent, message: pb.FromAgent) -> None:
        with contextlib.suppress(OSError):  # its end is read elsewhere
            agent.socket.sendall(wire.message(message.SerializeToString()))

    # --- shared ---------------------------------------------------------------------------

    def _open(self) -> None:
        agent = Agent(self._made, self._address)
        self._made += 1
        self._waiting.append(agent)
        self._agents[agent.socket.fileno()] = agent
        self._poll.register(agent.socket.fileno(), select.EPOLLIN)

    def _end(self, agent: Agent) -> None:
        self._poll.unregister(agent.socket.fileno())
        del self._agents[agent.socket.fileno()]
        agent.socket.close()

    def _expect(self, round: int) -> None:
        self._round, self._told = round, 0

    def _until_told(self, began: float, goal: int) -> Answer:
        while self._told < goal:
            if self._lost or time.monotonic() > began + BOUND:
                raise SystemExit(f"{self._told} of {goal} told, {self._lost} lost their connection")
            self._turn()
        return {"began": began, "ended": self._last_told}

    def _hello(self, index: int) -> pb.FromAgent:
        ip = f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}"
        return pb.FromAgent(
            hello=pb.Hello(
                version=pb.Version(major=version.WIRE.major, minor=version.WIRE.minor),
                run_id=self._run_id,
                node_id=f"node-{index:05}",
                incarnation=_incarnation(index),
                slots=SLOTS,
                host=ip,
                knock_address=self._door(index),
                role="default",
                labels={"zone": f"z{index // 2048}", "rack": f"r{index // 32}"},
                spare_store=f"{ip}:29500",
                report=pb.NodeReport(
                    round=self._ran,
                    phase=pb.NodeReport.RUNNING if self._ran else pb.NodeReport.IDLE,
                ),
            )
        )

    def _door(self, index: int) -> str:
        """127.x.y.z, where x.y.z is the index and one."""
        x, y, z = (index + 1).to_bytes(3)
        return f"127.{x}.{y}.{z}:{self._doors.getsockname()[1]}"


def _incarnation(index: int) -> int:
    return 1_700_000_000_000 + index


def main() -> None:
    """Serve the agents of one master until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("run_id")
    args = parser.parse_args()
    lift_open_files()
    Crowd(("127.0.0.1", args.port), args.run_id).run()


if __name__ == "__main__":
    main()
