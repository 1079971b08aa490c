"""Any events in any order: the job stays legal, and its journal gives it back."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.master import events as ev
from elastic.master import journal as journals
from elastic.master.events import Event, Incarnation, KnockAnswer, NodeId, NodePhase, RankFailure
from elastic.master.job import Job, handle
from elastic.master.journal import Entry, Journal
from elastic.master.nodes import SILENT_KNOCKS, NodeState
from elastic.master.policy import Policy
from tests.master.legal import check

NAMES = [NodeId(name) for name in "abcdef"]

policies = st.builds(
    lambda least, more, unit, **rest: Policy(
        min_nodes=least,
        max_nodes=max(least + more, -(-least // unit) * unit),
        node_unit=unit,
        **rest,
    ),
    least=st.integers(1, 3),
    more=st.integers(0, 4),
    unit=st.sampled_from([1, 1, 1, 2, 3]),
    rank_unit=st.sampled_from([1, 1, 2, 3]),
    max_restarts=st.sampled_from([0, 3, 1000]),
    fault_budget=st.sampled_from([0, 3, 1000, 1000]),
    same_failure_limit=st.sampled_from([1, 3, 1000]),
    below_min_timeout=st.sampled_from([None, None, 4.0]),
    failure_grace=st.sampled_from([0.0, 2.0]),
    exclude_straggler=st.booleans(),
    precheck=st.sampled_from(["off", "off", "quick", "full"]),
    verdict_age=st.sampled_from([0.5, 4.0, 3600.0]),
)

failures = st.builds(
    RankFailure,
    rank=st.sampled_from([-1, 0, 1, 2, 7]),
    what=st.sampled_from(ev.Failed),
    local_rank=st.integers(0, 1),
    exit_code=st.sampled_from([1, -9, -6, -11, 0]),
    error_type=st.sampled_from(["", "ValueError", "DistNetworkError", "RuntimeError"]),
    message=st.sampled_from(["", "at step 5", "Connection closed by peer"]),
    oom_killed=st.booleans(),
    kernel_log=st.sampled_from(
        [(), ("NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus",)]
    ),
)

nodes = st.sampled_from(NAMES)
life = st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1])
"""Of the node's agent: 0 is the one that the master knows, 1 a new one, -1 an old one."""
rounds = st.sampled_from([0, 0, 0, 0, -1, 1])
"""From the current one."""

wishes = st.one_of(
    st.tuples(st.just("attach"), st.lists(st.tuples(nodes, life), min_size=1, max_size=6)),
    st.tuples(st.just("attach"), st.just([(name, 0) for name in NAMES])),
    st.tuples(st.just("detach"), nodes, life),
    st.tuples(st.just("knock"), nodes, life, st.sampled_from(KnockAnswer)),
    st.tuples(st.just("leave"), nodes, life),
    st.tuples(
        st.just("report"),
        nodes,
        life,
        rounds,
        st.sampled_from(NodePhase),
        st.lists(failures, max_size=2),
    ),
    st.tuples(st.just("report"), nodes, life, rounds, st.just(NodePhase.FINISHED), st.just([])),
    st.tuples(st.just("store"), nodes, life, st.booleans()),
    st.tuples(st.just("stores")),
    st.tuples(st.just("together"), st.lists(st.tuples(nodes, life, st.booleans()), max_size=4)),
    st.tuples(st.just("stalled")),
    st.tuples(st.just("unit"), nodes, life, rounds, st.sampled_from([-1, 0, 1, 1, 2, 3, 4])),
    st.tuples(st.just("prepared"), nodes, life),
    st.tuples(st.just("probed"), nodes, life, st.sampled_from(["ok", "ok", "faulty", "unknown"])),
    st.tuples(st.just("works")),
    st.tuples(st.just("paired"), st.sampled_from(["ok", "ok", "faulty", "unknown"]), st.booleans()),
    st.tuples(st.just("pairs")),
    st.tuples(st.just("step"), rounds, st.integers(-1, 9)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("saving"), rounds),
    st.tuples(st.just("damaged"), rounds, st.integers(1, 4)),
    st.tuples(st.just("doubted"), rounds, st.integers(-1, 3)),
    st.tuples(st.just("met"), rounds),
    st.tuples(st.just("slow"), rounds, nodes, st.sampled_from([0.1, 0.6]), st.booleans()),
    st.tuples(st.just("drain"), st.none() | nodes | nodes | nodes),
    st.tuples(st.just("stop")),
    st.tuples(st.just("start")),
    st.tuples(st.just("tick")),
)

gaps = st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0, 1.0, 2.5, 5.0, 100.0])
histories = st.lists(st.tuples(gaps, wishes), max_size=60)


@dataclass
class World:
    """Turns wishes into events of the moment: agents name each store once, and say it again."""

    policy: Policy
    job: Job = field(default_factory=Job)
    now: float = 0.0
    stores: dict[tuple[NodeId, int], str] = field(default_factory=dict)
    made: int = 0
    used: set[str] = field(default_factory=set)
    written: list[Entry] = field(default_factory=list)
    wake: float | None = None

    def feed(self, event: Event) -> None:
        decision = handle(self.job, event, self.now, self.policy)
        check(self.job, event, decision, self.now, self.policy, self.used)
        assert handle(self.job, event, self.now, self.policy) == decision, "not a function"
        if decision.state is not self.job:  # as the shell does
            self.written.append(Entry(wall=self.now, job=self.now, event=event))
        else:
            assert not any(isinstance(e, ev.Finished) for e in decision.effects)
        self.job = decision.state
        for effect in decision.effects:
            if isinstance(effect, ev.WakeAt) and not (
                self.wake is not None and self.now < self.wake <= effect.time
            ):
                self.wake = effect.time

    def play(self, history: Iterable[tuple[float, tuple[object, ...]]]) -> None:
        self.feed(ev.MasterStarted("job"))
        for gap, wish in history:
            self.now += gap
            self.feed(self.event(*wish))

    def event(self, kind: object, *about: object) -> Event:
        match kind, *about:
            case "attach", list(arrivals):
                return ev.Attached(tuple(self.arrival(node, of) for node, of in arrivals))
            case "detach", node, of:
                return ev.Detached((self.life(node, of),))
            case "knock", node, of, KnockAnswer() as answer:
                return ev.Knocked(((*self.life(node, of), answer),))
            case "leave", node, of:
                return ev.Left(*self.life(node, of), "a\nsignal")
            case "report", node, of, int(ahead), NodePhase() as phase, list(seen):
                return ev.Reported(*self.life(node, of), self.report(ahead, phase, seen))
            case "store", node, of, bool(fresh):
                node_id, incarnation = self.life(node, of)
                store = self.store(node_id, incarnation, fresh=fresh)
                return ev.StoreReady(node_id, incarnation, store)
            case "unit", node, of, int(ahead), int(unit):
                return ev.UnitDeclared(self.job.last_round + ahead, unit, *self.life(node, of))
            case "together", list(gone):
                lives = [(*self.life(node, of), goes) for node, of, goes in gone]
                detached = ev.Detached(tuple((node_id, life) for node_id, life, _ in lives))
                answers = tuple(
                    (node_id, life, KnockAnswer.GONE if goes else KnockAnswer.ALIVE)
                    for node_id, life, goes in lives
                )
                return ev.Together((detached, ev.Knocked(answers)))
            case "stalled", *_:
                return ev.Stalled()
            case "step", int(ahead), int(step):
                done = self.job.ledger.step + step - 3
                return ev.Progressed(self.job.last_round + ahead, done, plain=step > 4)
            case "prepared", node, of:
                return ev.Prepared(*self.life(node, of))
            case "probed", node, of, str(state):
                return self.probed(*self.life(node, of), state)
            case "works", *_:
                for known in tuple(self.job.nodes.values()):
                    self.feed(self.probed(known.node_id, known.incarnation, "ok"))
            case "paired", str(state), bool(passed):
                return ev.Paired(self.pairings(state, passed)[:2])
            case "pairs", *_:
                self.feed(ev.Paired(self.pairings("ok", True)))
            case "saving", int(ahead):
                return ev.Saving(self.job.last_round + ahead)
            case "met", int(ahead):
                return ev.Met(self.job.last_round + ahead, 7)
            case "damaged", int(ahead), int(step):
                damage = ev.Damage(
                    checkpoint="c", round=1, step=step, from_memory=step > 2, what="a\ntensor"
                )
                return ev.Damaged(self.job.last_round + ahead, damage)
            case "doubted", int(ahead), int(after):
                return ev.Doubted(
                    round=self.job.last_round + ahead, checkpoint="c", after=after, ranks=(0, after),
                    what="one\nrank",
                )  # fmt: skip
            case "slow", int(ahead), node, float(share), bool(over):
                return ev.Straggling(
                    round=self.job.last_round + ahead, kind="rank", ranks=(0,), nodes=(NodeId(str(node)),),
                    share=share, pays=True, over=over, reason="it\nis slow",
                )  # fmt: skip
            case "restart", *_:
                return ev.RestartAsked("by\nhand")
            case "drain", node:
                return ev.DrainAsked(node, "")  # type: ignore[arg-type]
            case "stop", *_:
                return ev.Stopping("told to")
            case "start", *_:
                return ev.MasterStarted(f"job{len(self.written)}")
            case "stores", *_:
                for known in tuple(self.job.nodes.values()):
                    store = self.store(known.node_id, known.incarnation, fresh=True)
                    self.feed(ev.StoreReady(known.node_id, known.incarnation, store))
        return ev.Tick()

    def life(self, node: object, of: object) -> tuple[NodeId, Incarnation]:
        node_id = NodeId(str(node))
        known = self.job.nodes.get(node_id)
        return node_id, Incarnation((known.incarnation if known else 5) + int(str(of)))

    def arrival(self, node: object, of: object) -> ev.Attachment:
        node_id, incarnation = self.life(node, of)
        return ev.Attachment(
            node_id=node_id,
            incarnation=incarnation,
            slots=1 + ord(node_id) % 3,
            store=self.store(node_id, incarnation, fresh=False),
            labels=(("rack", str(ord(node_id) % 2)),),
            report=self.report(0, NodePhase.RUNNING, []),
        )

    def store(self, node: NodeId, incarnation: int, *, fresh: bool) -> str:
        if fresh or (node, incarnation) not in self.stores:
            self.made += 1
            self.stores[node, incarnation] = f"{node}:{self.made}"
        return self.stores[node, incarnation]

    def probed(self, node_id: NodeId, incarnation: Incarnation, state: str) -> ev.Probed:
        known = self.job.nodes.get(node_id)
        number = known.probe.number if known is not None and known.probe is not None else 1
        health = ev.Health(
            node_id=node_id, incarnation=incarnation, number=number, level=self.policy.precheck,
            state=state, what="a\nfault" if state == "faulty" else "", seconds=1.0,
        )  # fmt: skip
        return ev.Probed((health,))

    def pairings(self, state: str, passed: bool) -> tuple[ev.Pairing, ...]:
        """Of all that are being tested with others."""
        found = []
        for node in self.job.nodes.values():
            if node.probe is not None and node.probe.pairs is not None:
                mine = [pair for pair in node.probe.pairs.pairs if node.node_id in pair]
                tests = tuple(ev.PairTest(passed=passed, what="a\nlink", gather=0.1) for _ in mine)
                found.append(
                    ev.Pairing(
                        node_id=node.node_id,
                        incarnation=node.incarnation,
                        number=node.probe.number,
                        state=state,
                        what="a\nfault",
                        matmul=(1.0,),
                        tests=tests,
                    )
                )
        return tuple(found)

    def report(self, ahead: int, phase: NodePhase, seen: list[RankFailure]) -> ev.Report:
        return ev.Report(round=self.job.last_round + ahead, phase=phase, failures=tuple(seen))


@settings(max_examples=150)
@given(policies, histories)
def test_any_order_of_events_leaves_a_legal_state(
    policy: Policy, history: list[tuple[float, tuple[object, ...]]]
) -> None:
    World(policy).play(history)


@settings(max_examples=80)
@given(policies, histories)
def test_time_alone_settles_everything(
    policy: Policy, history: list[tuple[float, tuple[object, ...]]]
) -> None:
    """Nobody says anything any more, nor answers: soon the job stands, waits or is over."""
    world = World(policy)
    world.play(history)
    for _ in range(40):
        asked = [
            node
            for node in world.job.nodes.values()
            if node.asked and node.state is NodeState.UNREACHABLE
        ]
        for node in asked * SILENT_KNOCKS:
            silent = (node.node_id, node.incarnation, KnockAnswer.SILENT)
            world.feed(ev.Knocked((silent,)))
        if world.job.result is not None or (world.wake is None and not asked):
            break  # the shell knocks at who was asked until it is back, or gone
        world.now, world.wake = max(world.now, world.wake or 0.0), None
        world.feed(ev.Tick())
    else:
        raise AssertionError("it wakes up for ever")
    if world.job.result is not None:
        return
    states = {node.state for node in world.job.nodes.values()}
    assert states <= {"attached"}, "who is silent is lost in the end"
    before = world.job
    world.now += 1e6
    world.feed(ev.Tick())
    assert world.job is before, "time alone had something left to say"


@settings(max_examples=60)
@given(policies, histories, st.integers(2, 30))
def test_a_replayed_journal_gives_the_same_state(
    policy: Policy, history: list[tuple[float, tuple[object, ...]]], snapshot_every: int
) -> None:
    world = World(policy)
    world.play(history)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(journals, "SNAPSHOT_EVERY", snapshot_every),
    ):
        path = Path(folder) / "journal.db"
        journal = Journal(path)
        job = Job()
        for entry in world.written:
            job = handle(job, entry.event, entry.job, policy).state
            journal.append(entry, fence=False)
            journal.compact(job, entry.wall, entry.job)
        journal.close()
        journal = Journal(path)
        job, _, _, entries = journal.load()
        journal.close()
    assert len(entries) <= snapshot_every
    for entry in entries:
        job = handle(job, entry.event, entry.job, policy).state
    assert job == world.job


@settings(max_examples=60)
@given(policies, histories)
def test_seconds_add_up(policy: Policy, history: list[tuple[float, tuple[object, ...]]]) -> None:
    world = World(policy)
    world.play(history)
    ledger = world.job.ledger
    seconds = ledger.productive + sum(ledger.lost.values())
    assert abs(seconds - (ledger.since - ledger.began)) < 1e-6
