"""Which worker pods there should be: tables, and a cluster that does whatever it likes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.k8s.causes import Action, Cause, Rule
from elastic.k8s.observed import Pod
from elastic.k8s.supply import Memory, New, Plan, Seen, Wanted, legal, plan, refused, taken_away


def name(new: New) -> str:
    return f"j-worker-{new.slot}-r{new.attempt}"


class Watched(dict[str, Pod]):
    """Pods by name; what a watch tells of those that end."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: dict[str, Pod] = {}

    def __setitem__(self, name: str, pod: Pod) -> None:
        super().__setitem__(name, pod)
        if not pod.alive:
            self.ended.setdefault(name, pod)

    def __delitem__(self, name: str) -> None:
        self.ended.setdefault(name, self[name])
        super().__delitem__(name)


class Cluster:
    """Pods that start at once, unless they are told otherwise."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.memory, self.now = wanted, Memory(), 1000.0
        self.pods = Watched()
        self.attached: set[str] = set()
        self.lost: set[str] = set()
        self.slow: set[str] = set()
        self.room = self.quota = 10**6
        self.refused = ""
        self.made: list[str] = []
        self.said: list[Plan] = []

    def live(self) -> list[str]:
        return sorted(n for n, p in self.pods.items() if p.alive and n not in self.lost)

    def turn(self, passed: float = 0.0) -> Plan:
        self.now += passed
        seen = Seen(
            pods=tuple(self.pods.values()),
            ended=tuple(self.pods.ended.values()),
            attached=frozenset(self.attached & self.pods.keys()),
            lost=frozenset(self.lost & self.pods.keys()),
            slow=frozenset(self.slow),
            refused=self.refused,
        )
        self.pods.ended.clear()
        told = plan(self.wanted, seen, self.memory, self.now, name)
        self.memory = told.memory
        self.said.append(told)
        for gone, _ in told.delete:
            if gone in self.pods:
                del self.pods[gone]
            self.attached.discard(gone)
        for leaving, _ in told.withdraw:
            self.pods[leaving] = replace(self.pods[leaving], exit_code=213, phase="Failed")
            self.attached.discard(leaving)
        here = sum(not pod.over for pod in self.pods.values())  # those that are ending count, too
        made = told.create[: max(0, self.quota - here)]
        for new in made:
            self.add(new)
        self.memory = refused(self.memory, told.create[len(made) :])
        if not told.memory.closed:
            self.refused = "exceeded quota" if len(made) < len(told.create) else ""
        return told

    def forget(self) -> None:
        """As a launcher that starts anew, with the names that the master's journal has."""
        attempts: dict[int, int] = {}
        for made in self.made:
            slot, _, attempt = made.removeprefix("j-worker-").partition("-r")
            attempts[int(slot)] = max(attempts.get(int(slot), 0), int(attempt) + 1)
        self.memory = Memory(attempts=attempts)

    def add(self, new: New) -> None:
        made = name(new)
        assert made not in self.made, "one name, two pods"
        self.made.append(made)
        pod = Pod(name=made, uid=made, slot=new.slot, attempt=new.attempt, node=f"n{new.slot}")
        if len(self.live()) < self.room:
            self.pods[made] = replace(pod, phase="Running")
            self.attached.add(made)
        else:
            self.pods[made] = replace(pod, unschedulable="0/3 nodes are available")

    def settle(self) -> Plan:
        for _ in range(12):
            before = len(self.made)
            told = self.turn()
            if not (len(self.made) > before or told.delete or told.withdraw or told.ended):
                return told
        raise AssertionError("it never comes to rest")

    def end(self, pod: str, code: int = 137, **more: object) -> None:
        self.pods[pod] = replace(self.pods[pod], exit_code=code, phase="Failed", **more)  # type: ignore[arg-type]
        self.attached.discard(pod)


def four(**more: object) -> Cluster:
    cluster = Cluster(Wanted(replicas=4, least=2, **more))  # type: ignore[arg-type]
    told = cluster.settle()
    assert (told.ready, told.size, told.waiting) == (4, 4, 0)
    return cluster


@pytest.mark.parametrize(
    ("count", "unit", "sizes", "size"),
    [
        (5, 1, (), 5),
        (5, 2, (), 4),
        (1, 2, (), 0),
        (7, 1, (2, 4, 8), 4),
        (1, 1, (2, 4), 0),
        (9, 1, (2, 8), 8),
    ],
)
def test_legal(count: int, unit: int, sizes: tuple[int, ...], size: int) -> None:
    assert legal(count, Wanted(replicas=16, least=2, unit=unit, sizes=sizes)) == size


@pytest.mark.parametrize(
    ("code", "reason", "tells"),
    [(None, "Evicted", True), (137, "", True), (0, "", False), (None, "NodeLost", False)],
)
def test_the_master_hears_again_of_one_that_it_took_for_lost(
    code: int, reason: str, tells: bool
) -> None:
    """It was taken away, or its container was ended."""
    cluster = four()
    cluster.end("j-worker-1-r0", code, reason=reason)
    told = cluster.turn()
    found = [name for name, _ in taken_away(told, frozenset({"j-worker-0-r0"}))]
    assert found == (["j-worker-1-r0"] if tells else [])
    assert taken_away(told, frozenset({"j-worker-1-r0"})) == []


@pytest.mark.parametrize(("code", "goes"), [(1, True), (213, True), (0, False)])
def test_a_pod_whose_sidecar_runs_on_holds_nothing_unless_it_ended_well(
    code: int, goes: bool
) -> None:
    cluster = four()
    cluster.end("j-worker-1-r0", code)
    cluster.pods["j-worker-1-r0"] = replace(cluster.pods["j-worker-1-r0"], phase="Running")
    first = cluster.turn()
    assert [pod.name for pod, _ in first.ended] == ["j-worker-1-r0"]
    words = (("j-worker-1-r0", "its main container has ended, and another one runs on"),)
    assert first.delete == (words if goes else ())
    assert cluster.turn().delete == ()


def test_thirty_of_thirty_two_are_replaced_in_one_turn() -> None:
    cluster = Cluster(Wanted(replicas=32, least=2))
    cluster.settle()
    for pod in cluster.live()[:30]:
        cluster.end(pod)
    told = cluster.turn()
    assert len(told.create) == 30
    assert {new.attempt for new in told.create} == {1}
    assert len(told.ended) == 30


def test_a_pod_that_vanished_is_replaced_under_another_name() -> None:
    cluster = four()
    del cluster.pods["j-worker-2-r0"]
    told = cluster.turn()
    assert [name(new) for new in told.create] == ["j-worker-2-r1"]
    assert [verdict.cause for _, verdict in told.ended] == ["Deleted"]


def test_pods_that_end_before_their_agent_is_there_come_after_pauses() -> None:
    """Whatever it is that only they meet: the others train on, so no count of theirs ends the job."""
    cluster = Cluster(Wanted(replicas=3, least=1))
    cluster.settle()
    cluster.end("j-worker-1-r0", 1)

    def next_ends(step: int) -> None:
        """Of the slot, whose agent never was there; the job finishes steps meanwhile."""
        cluster.attached -= {cluster.made[-1]}
        cluster.end(cluster.made[-1], step)

    cluster.turn()
    for code in (3, 4):  # at once
        next_ends(code)
        made = len(cluster.made)
        cluster.turn()
        assert len(cluster.made) == made + 1
    for pause in (10, 20, 40, 80, 160, 300, 300):
        next_ends(pause % 251)
        made = len(cluster.made)
        told = cluster.turn()
        assert (told.fail, told.until) == (None, cluster.now + pause)
        cluster.turn(pause - 1)
        assert len(cluster.made) == made
        cluster.turn(1)
        assert len(cluster.made) == made + 1
    assert cluster.made[-1] == "j-worker-1-r10"
    cluster.turn()  # this one's agent came
    cluster.end(cluster.made[-1], 3)
    cluster.turn()
    assert cluster.made[-1] == "j-worker-1-r11"


def test_pods_that_others_end_before_their_agent_is_there_come_at_once() -> None:
    cluster = Cluster(Wanted(replicas=1, least=1))
    cluster.turn()
    for _ in range(9):
        cluster.attached.clear()
        cluster.turn()
        cluster.pods.clear()  # deleted
        made = len(cluster.made)
        cluster.turn()
        assert len(cluster.made) == made + 1


def test_a_pod_that_hangs_in_its_end_blocks_nothing() -> None:
    cluster = four()
    cluster.pods["j-worker-2-r0"] = replace(cluster.pods["j-worker-2-r0"], deleting=True)
    assert [name(new) for new in cluster.turn().create] == ["j-worker-2-r1"]
    cluster.turn()
    assert "j-worker-2-r0" in cluster.pods


def test_one_whose_agent_is_lost_is_deleted_and_replaced() -> None:
    cluster = four()
    cluster.lost.add("j-worker-1-r0")
    cluster.attached.discard("j-worker-1-r0")
    told = cluster.turn()
    assert [n for n, _ in told.delete] == ["j-worker-1-r0"]
    assert [v.action for _, v in told.ended] == [Action.REPLACE_ELSEWHERE]
    assert cluster.settle().ready == 4


def test_victims_are_those_that_do_not_start_then_slow_ones_then_the_highest() -> None:
    cluster = four()
    cluster.slow.add("j-worker-1-r0")
    cluster.wanted = replace(cluster.wanted, replicas=2)
    told = cluster.turn()
    assert [n for n, _ in told.withdraw] == ["j-worker-1-r0", "j-worker-3-r0"]
    assert told.size == 2
    cluster.settle()
    assert cluster.live() == ["j-worker-0-r0", "j-worker-2-r0"]
    assert not any(told.ended for told in cluster.said[-2:]), "a victim's end is no failure"
    assert sorted(cluster.pods) == cluster.live(), "nothing is left of who has left"


def test_a_victim_that_fails_while_a_sidecar_runs_on_is_deleted_once() -> None:
    cluster = four()
    cluster.wanted = replace(cluster.wanted, replicas=3)
    seen = Seen(pods=tuple(cluster.pods.values()), attached=frozenset(cluster.attached))
    first = plan(cluster.wanted, seen, cluster.memory, 2000.0, name)
    ((victim, _),) = first.withdraw
    cluster.end(victim, code=1)
    cluster.pods[victim] = replace(cluster.pods[victim], phase="Running")
    seen = replace(seen, pods=tuple(cluster.pods.values()))
    told = plan(cluster.wanted, seen, first.memory, 2001.0, name)
    assert told.delete == ((victim, "3 worker pods are wanted"),)


def test_a_victim_that_does_not_leave_is_deleted() -> None:
    cluster = four(drain=60.0)
    cluster.wanted = replace(cluster.wanted, replicas=3)
    seen = Seen(pods=tuple(cluster.pods.values()), attached=frozenset(cluster.attached))
    first = plan(cluster.wanted, seen, cluster.memory, 2000.0, name)
    assert (len(first.withdraw), first.delete, first.until) == (1, (), 2060.0)
    assert plan(cluster.wanted, seen, first.memory, 2059.0, name).delete == ()
    late = plan(cluster.wanted, seen, first.memory, 2060.0, name)
    assert [n for n, _ in late.delete] == ["j-worker-3-r0"]
    assert late.withdraw == ()


def test_scaled_down_and_up_again() -> None:
    cluster = four()
    for replicas in (2, 4, 3):
        cluster.wanted = replace(cluster.wanted, replicas=replicas)
        assert cluster.settle().ready == replicas


def test_hot_spares_are_pods_beyond_and_filled_up() -> None:
    cluster = Cluster(Wanted(replicas=2, least=1, spares=1))
    told = cluster.settle()
    assert (told.ready, told.size, told.spares, told.waiting) == (3, 2, 1, 0)
    cluster.end("j-worker-0-r0")
    assert [name(new) for new in cluster.turn().create] == ["j-worker-0-r1"]


def unplaced(cluster: Cluster) -> None:
    cluster.room = 3
    cluster.end("j-worker-3-r0")
    told = cluster.settle()
    assert [n for n, _ in told.pending] == ["j-worker-3-r1"]


def test_it_shrinks_when_pods_find_no_place_and_grows_when_they_do() -> None:
    cluster = four(pending_timeout=900.0, cooldown=300.0)
    unplaced(cluster)
    assert cluster.turn(899.0).size == 4
    told = cluster.turn(1.0)
    assert (told.size, told.desired, told.create, told.delete) == (3, 4, (), ()), (
        "the request stays"
    )
    pod = cluster.pods["j-worker-3-r1"]
    cluster.pods[pod.name] = replace(pod, unschedulable="", phase="Running")
    cluster.attached.add(pod.name)
    waits = cluster.turn(299.0)
    assert (waits.size, waits.ready, waits.waiting) == (3, 4, 1)
    assert cluster.turn(1.0).size == 4


def test_a_part_of_a_unit_is_released_and_asked_for_again() -> None:
    cluster = Cluster(Wanted(replicas=4, least=2, unit=2, pending_timeout=900.0, cooldown=300.0))
    cluster.room = 3
    told = cluster.settle()
    assert (told.ready, told.waiting) == (3, 1), "shown as waiting"
    assert cluster.turn(899.0).waiting == 1
    cluster.turn(1.0)
    told = cluster.settle()
    assert (told.ready, told.size, len(cluster.live())) == (2, 2, 2), "released"
    assert cluster.turn(200.0).create == ()
    assert len(cluster.turn(100.0).create) == 2, "after the cooldown"


def test_a_part_of_a_unit_is_kept_as_a_spare() -> None:
    wanted = Wanted(replicas=4, least=2, unit=2, spares=1, pending_timeout=900.0)
    cluster = Cluster(wanted)
    cluster.room = 3
    cluster.settle()
    cluster.turn(900.0)
    told = cluster.settle()
    assert (told.ready, told.spares, told.waiting, told.size) == (3, 1, 0, 2)


def test_a_quota_and_it_goes_on_smaller_asks_on_and_grows_when_there_is_room() -> None:
    cluster = Cluster(Wanted(replicas=4, least=2, cooldown=300.0, refusal=30.0))
    cluster.quota = 3
    cluster.settle()
    assert cluster.turn(29.0).size == 4, "a quota counts pods that are ending"
    told = cluster.turn(1.0)
    assert (told.size, told.desired, told.ready, told.waiting) == (3, 4, 3, 0)
    assert [name(new) for new in told.create] == ["j-worker-3-r0"], "it asks on"
    cluster.quota = 4
    assert cluster.turn(100.0).create
    assert (cluster.turn().size, cluster.refused) == (3, "")
    assert cluster.turn(200.0).size == 4


def test_pods_that_are_still_starting_are_of_the_smaller_size() -> None:
    cluster = Cluster(Wanted(replicas=4, least=1, refusal=30.0))
    cluster.quota = 3
    cluster.turn()
    cluster.attached.clear()
    cluster.turn()
    assert cluster.turn(30.0).size == 3


def test_pods_that_no_watch_has_shown_yet_are_of_the_smaller_size() -> None:
    cluster = Cluster(Wanted(replicas=4, least=1, refusal=0.0))
    cluster.quota = 3
    cluster.turn()
    late = cluster.pods.pop("j-worker-2-r0")
    assert cluster.turn().size == 3
    cluster.pods[late.name] = late
    assert cluster.turn().size == 3


def test_a_quota_for_a_part_of_a_unit() -> None:
    wanted = Wanted(replicas=4, least=2, unit=2, cooldown=300.0, refusal=30.0)
    cluster = Cluster(wanted)
    cluster.quota = 3
    assert cluster.settle().waiting == 1
    cluster.turn(30.0)
    told = cluster.settle()
    assert (told.ready, told.size, told.create, len(cluster.live())) == (2, 2, (), 2), "released"
    assert cluster.refused, "that is still why"
    cluster.turn(200.0)
    assert len(cluster.turn(100.0).create) == 2, "after the cooldown it asks again"
    assert cluster.turn(29.0).size == 4
    cluster.quota = 4
    assert (cluster.settle().size, cluster.refused) == (4, "")
    spare = Cluster(replace(wanted, spares=1))
    spare.quota = 3
    spare.settle()
    told = spare.turn(30.0)
    assert (told.size, told.spares, told.waiting) == (2, 1, 0)
    assert len(told.create) == 2, "kept as a spare: it asks on"


def test_a_quota_below_the_smallest_size_and_other_policies() -> None:
    for policy, fails in (("ShrinkToMin", False), ("Wait", False), ("Fail", True)):
        wanted = Wanted(replicas=4, least=2, pending=policy, pending_timeout=900.0)
        cluster = Cluster(wanted)
        cluster.quota = 1 if policy == "ShrinkToMin" else 3
        cluster.settle()
        assert cluster.turn(899.0).fail is None
        told = cluster.turn(1.0)
        assert told.fail == (("QuotaExceeded", "exceeded quota") if fails else None)
        assert (told.size, len(told.create)) == (4, 0 if fails else 4 - cluster.quota)


def test_no_place_and_the_policy_is_to_fail_or_to_wait() -> None:
    for policy, fails in (("Fail", True), ("Wait", False)):
        cluster = four(pending_timeout=900.0, pending=policy)
        unplaced(cluster)
        told = cluster.turn(900.0)
        assert (told.fail is not None) is fails
        assert told.size == 4


def test_an_image_that_nobody_may_have() -> None:
    cluster = Cluster(Wanted(replicas=2, least=1, hopeless=300.0))
    cluster.settle()
    for n in cluster.live():
        cluster.pods[n] = replace(cluster.pods[n], waiting="InvalidImageName", phase="Pending")
        cluster.attached.discard(n)
    assert cluster.turn().fail is None
    assert cluster.turn(299.0).fail is None
    told = cluster.turn(1.0)
    assert told.fail is not None
    assert told.fail[0] == "ImagePullFailed"


def held(cluster: Cluster, name: str, waiting: str) -> None:
    """Its container is not made, for that reason; empty: it is, after all."""
    now = replace(cluster.pods[name], waiting=waiting)
    cluster.pods[name] = now
    (cluster.attached.discard if waiting else cluster.attached.add)(name)


@pytest.mark.parametrize(
    ("waiting", "patience"), [("InvalidImageName", 0.0), ("ErrImagePull", 300.0)]
)
def test_enough_others_train_without_it(waiting: str, patience: float) -> None:
    cluster = four(image=300.0, hopeless=300.0, pending_timeout=900.0, cooldown=300.0)
    held(cluster, "j-worker-3-r0", waiting)
    if patience:
        assert cluster.turn().size == 4
        assert cluster.turn(patience - 1.0).size == 4
        cluster.turn(1.0)
    told = cluster.turn()
    assert (told.fail, told.ready, told.size, told.delete) == (None, 3, 3, ()), "the request stays"
    assert cluster.turn(800.0).fail is None
    held(cluster, "j-worker-3-r0", "")
    assert cluster.turn().size == 4


def test_an_image_that_may_come_is_waited_for_where_all_need_it() -> None:
    cluster = four(image=300.0, hopeless=300.0)
    for name in cluster.live():
        held(cluster, name, "ImagePullBackOff")
    cluster.turn()
    told = cluster.turn(2000.0)
    assert (told.fail, told.size, len(told.pending)) == (None, 4, 4)


def test_an_image_and_the_policy_is_to_fail() -> None:
    cluster = four(pending="Fail", pending_timeout=900.0)
    held(cluster, "j-worker-3-r0", "ErrImagePull")
    cluster.turn()
    assert cluster.turn(899.0).fail is None
    assert cluster.turn(1.0).fail == ("ImagePullFailed", "j-worker-3-r0: ErrImagePull")


def test_all_workers_end_well_and_the_job_is_not_over() -> None:
    cluster = four()
    for number, pod in enumerate(cluster.live(), 1):
        cluster.end(pod, 0)
        told = cluster.turn()
        assert told.create == (), "one that is done is not replaced"
        assert (told.fail is not None) is (number == 4)
    assert told.fail is not None
    assert "start elastic-run?" in told.fail[1]


def test_too_few_are_left_once_some_have_ended_well() -> None:
    """The others have ten minutes to end, too."""
    cluster = four()
    for pod in cluster.live()[:3]:
        cluster.end(pod, 0)
    assert cluster.turn().fail is None
    assert cluster.turn(599.0).fail is None
    told = cluster.turn(1.0)
    assert told.fail is not None
    assert "3 of 4 worker pods end with exit code 0" in told.fail[1]


def test_nothing_is_made_for_a_job_that_fails() -> None:
    cluster = four()
    cluster.end("j-worker-1-r0", 127)
    told = cluster.turn()
    assert told.fail is not None
    assert told.create == ()


@pytest.mark.parametrize(
    ("action", "check"),
    [
        (Action.FAIL, lambda told: told.fail is not None),
        (Action.RESTART_JOB, lambda told: told.restart),
        (Action.SHRINK, lambda told: told.size == 2),
        (Action.RESTART_UNIT, lambda told: [n for n, _ in told.delete] == ["j-worker-0-r0"]),
        (Action.IGNORE, lambda told: len(told.create) == 1),
    ],
)
def test_actions_of_rules(action: Action, check: object) -> None:
    rule = Rule(name="mine", exit_codes=(42,), action=action)
    cluster = four(unit=2, rules=(rule,))
    cluster.end("j-worker-1-r0", 42)
    told = cluster.turn()
    assert callable(check)
    assert check(told)
    cluster.settle()


def test_a_pod_that_was_made_and_not_seen_yet_is_not_made_again() -> None:
    wanted = Wanted(replicas=2, least=1)
    first = plan(wanted, Seen(), Memory(), 0.0, name)
    assert len(first.create) == 2
    assert plan(wanted, Seen(), first.memory, 30.0, name).create == ()
    again = plan(wanted, Seen(), refused(first.memory, first.create[:1]), 30.0, name)
    assert again.create == (New(slot=0, attempt=0),)
    other = plan(wanted, Seen(), refused(first.memory, first.create[:1], taken=True), 30.0, name)
    assert other.create == (New(slot=0, attempt=1),)
    assert plan(wanted, Seen(), first.memory, 1e6, name).create == (), "a watch may be silent"
    missed = Seen(missed=frozenset({"j-worker-1-r0"}))
    assert plan(wanted, missed, first.memory, 30.0, name).create == (New(slot=1, attempt=1),)


def test_a_pod_that_comes_and_goes_between_two_looks_is_judged_once_and_replaced() -> None:
    wanted = Wanted(replicas=1, least=1)
    first = plan(wanted, Seen(), Memory(), 0.0, name)
    pod = Pod(name="j-worker-0-r0", uid="u", slot=0, attempt=0, phase="Failed", exit_code=137)
    told = plan(wanted, Seen(ended=(pod,)), first.memory, 1.0, name)
    assert [(one.name, verdict.cause) for one, verdict in told.ended] == [(pod.name, Cause.KILLED)]
    assert told.create == (New(slot=0, attempt=1),)
    unmade = Seen(ended=(pod,))  # its creation was not answered, so it counts as not made
    again = plan(wanted, unmade, refused(first.memory, first.create), 1.0, name)
    assert again.create == (New(slot=0, attempt=1),)
    there = plan(wanted, Seen(pods=(pod,), ended=(pod,)), first.memory, 1.0, name)
    assert len(there.ended) == 1
    gone = plan(wanted, Seen(ended=(pod,)), there.memory, 2.0, name)
    assert gone.ended == ()


def test_who_starts_anew_makes_nothing_twice() -> None:
    cluster = four()
    cluster.end("j-worker-1-r0")
    cluster.settle()
    cluster.memory = Memory()
    told = cluster.turn()
    assert (told.create, told.delete, told.withdraw) == ((), (), ())


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["end", "vanish", "delete", "lose", "scale", "room", "quota", "forget", "time", "oom"]
        ),
        st.integers(0, 9),
    ),
    max_size=25,
)


@settings(max_examples=80, deadline=None)
@given(
    events=EVENTS,
    unit=st.sampled_from([1, 2]),
    spares=st.integers(0, 2),
    pending=st.sampled_from(["ShrinkToMin", "Wait"]),
)
def test_whatever_happens(
    events: list[tuple[str, int]], unit: int, spares: int, pending: str
) -> None:
    """No pod twice, never more than wanted, and once it is left alone it comes to rest as it should be."""
    wanted = Wanted(replicas=4, least=2, unit=unit, spares=spares, pending=pending)
    cluster = Cluster(wanted)
    for what, number in events:
        live = cluster.live()
        pod = live[number % len(live)] if live else ""
        if what == "end" and pod:
            cluster.end(pod)
        elif what == "oom" and pod:
            cluster.end(pod, ended="OOMKilled")
        elif what == "vanish" and pod:
            del cluster.pods[pod]
        elif what == "delete" and pod:
            cluster.pods[pod] = replace(cluster.pods[pod], deleting=True)
        elif what == "lose" and pod:
            cluster.lost.add(pod)
            cluster.attached.discard(pod)
        elif what == "scale":
            cluster.wanted = replace(cluster.wanted, replicas=max(2, number // unit * unit))
        elif what == "room":
            cluster.room = number
        elif what == "quota":
            cluster.quota = number
        elif what == "forget":
            cluster.forget()
        elif what == "time":
            cluster.now += 100.0 * number
        cluster.turn()
        assert len(cluster.live()) <= cluster.wanted.replicas + spares or cluster.memory.leaving
    cluster.room = cluster.quota = 10**6
    for n, pod_ in list(cluster.pods.items()):
        if pod_.unschedulable and pod_.alive:
            cluster.pods[n] = replace(pod_, unschedulable="", phase="Running")
            cluster.attached.add(n)
    cluster.settle()
    cluster.now += 10_000.0
    told = cluster.settle()
    assert len(cluster.live()) == legal(cluster.wanted.replicas, cluster.wanted) + spares
    assert (told.ready, told.size) == (len(cluster.live()), cluster.wanted.replicas)


def test_what_is_over_and_holds_its_node_is_deleted() -> None:
    """A second container, a proxy say, runs on: its pod stays Running, with all that it has."""
    cluster = four()
    name = "j-worker-1-r0"
    cluster.pods[name] = replace(cluster.pods[name], exit_code=137)
    cluster.attached.discard(name)
    told = cluster.turn()
    assert [verdict.cause for _, verdict in told.ended] == [Cause.KILLED]
    assert [gone for gone, _ in told.delete] == [name]
    assert told.create == (New(slot=1, attempt=1),)
