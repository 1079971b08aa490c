"""What is deleted: never the newest, never what is pinned, never what somebody may still need."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.storage.retention import Stored, leftovers, spent
from elastic.proto import manifest
from elastic.proto.manifest import Manifest, Shard
from elastic.proto.terms import Retention

JOB, OTHER = "a" * 32, "b" * 32

rules = st.builds(
    Retention,
    last=st.integers(0, 4),
    every=st.integers(0, 4),
    best=st.integers(0, 3),
    highest=st.booleans(),
)


@st.composite
def steps(draw: st.DrawFn) -> list[Stored]:
    """Some, committed in any order: a job may have gone back."""
    numbers = draw(st.lists(st.integers(0, 30), unique=True, max_size=12))
    return [
        Stored(
            step=step,
            sequence=sequence,
            value=draw(st.none() | st.integers(-2, 2).map(float)),
            pinned=draw(st.integers(0, 5)) == 0,
        )
        for sequence, step in enumerate(numbers, 1)
    ]


def void(stored: list[Stored]) -> set[int]:
    """Those that somebody went back behind."""
    return {
        one.step
        for one in stored
        if any(other.sequence > one.sequence and other.step < one.step for other in stored)
    }


@given(steps(), rules)
def test_the_newest_and_what_is_pinned_stay(stored: list[Stored], rules: Retention) -> None:
    gone = spent(stored, rules)
    assert not {one.step for one in stored if one.pinned} & set(gone)
    if gone:
        newest = max(stored, key=lambda one: one.sequence)
        assert newest.step > max(gone), "what is beyond it may be on its way to be written anew"
    if rules == Retention(highest=rules.highest):
        assert gone == []


@given(steps(), rules)
def test_what_a_rule_keeps_stays_and_all_else_goes(stored: list[Stored], rules: Retention) -> None:
    gone = set(spent(stored, rules))
    behind = max((one.sequence for one in stored if one.step in void(stored)), default=0)
    since = sorted(one.step for one in stored if one.sequence > behind)
    line = [one for one in stored if one.step not in void(stored)]
    count = max(1, rules.last)
    if (behind and len(since) < count) or not stored:
        assert not gone, "any that is not void may be the step that was gone back to"
        return
    last = set(since[-count:])
    every = {one.step for one in line if rules.every and one.step % rules.every == 0}
    pinned = {one.step for one in stored if one.pinned}
    assert not (last | every | pinned) & gone
    if rules != Retention(highest=rules.highest):
        passed = {step for step in void(stored) if step < min(last)}
        assert void(stored) & gone == passed - pinned
    valued = [one for one in line if one.value is not None]
    best = {one.step for one in valued} - gone
    assert len(best) >= min(rules.best, len(valued)) or not gone
    for one in valued:
        if one.step in gone:
            better = [
                other
                for other in valued
                if other.value == one.value or (other.value > one.value) == rules.highest  # type: ignore[operator]
            ]
            assert len(better) - 1 >= rules.best, "there are enough as good or better"
    if gone:
        kept = {one.step for one in line} - gone - last - every - pinned
        assert len(kept) <= rules.best


@given(steps(), rules)
def test_deleting_once_is_enough(stored: list[Stored], rules: Retention) -> None:
    """But for a void step that is pinned: once nothing shows that it is void, the best may be another."""
    stored = [replace(one, pinned=one.pinned and one.step not in void(stored)) for one in stored]
    gone = spent(stored, rules)
    assert spent([one for one in stored if one.step not in gone], rules) == []


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 9), st.integers(1, 4)), max_size=20),
    st.integers(1, 4),
)
def test_who_goes_back_has_the_step_to_stand_on(
    commits: list[tuple[int | None, int]], last: int
) -> None:
    """commits: first back to one of those that are there, or not; then so many steps on."""
    there: dict[int, Stored] = {}
    since: list[int] = []
    at = 0
    for sequence, (back, on) in enumerate(commits, 1):
        newest = at
        if back is not None and there:
            at = sorted(there)[back % len(there)]
            since = []
        stands_on, at = at, at + on
        had = stands_on in there
        there[at] = Stored(step=at, sequence=sequence)
        since.append(at)
        for step in spent(list(there.values()), Retention(last=last)):
            del there[step]
        assert set(since[-last:]) <= there.keys()
        if had and at < newest and last > 1:
            assert stands_on in there, "if the newest is damaged it is what there is"


def test_rules_by_example() -> None:
    losses = {100: 0.5, 200: 0.3, 300: 0.4, 400: 0.3, 500: 0.6}
    stored = [
        Stored(step=step, sequence=number, value=value)
        for number, (step, value) in enumerate(losses.items())
    ]
    assert spent(stored, Retention(last=2)) == [100, 200, 300]
    assert spent(stored, Retention(every=200)) == [100, 300]
    assert spent(stored, Retention(best=1)) == [100, 200, 300], "of equals the newer; the newest"
    assert spent(stored, Retention(best=2, highest=True)) == [200, 300, 400]
    assert spent(stored, Retention(last=1, every=300, best=1)) == [100, 200]


def test_void_steps_by_example() -> None:
    """Back from 12 to 4, with the last two kept."""

    def gone(*steps: int, last: int = 2, every: int = 0, best: int = 0) -> list[int]:
        stored = [Stored(step=s, sequence=n, value=1 / s) for n, s in enumerate(steps)]
        return spent(stored, Retention(last=last, every=every, best=best))

    assert gone(4, 8, 12, 5) == []
    assert gone(4, 8, 12, 9) == [], "8 may be void too"
    assert gone(4, 8, 12, 5, 6) == [4]
    assert gone(8, 12, 6, 13) == [], "from 6, or back to 12"
    assert gone(8, 12, 6, 13, 14) == [8, 12, 6]
    assert gone(8, 12, 6, 13, 14, every=4) == [8, 12, 6]
    assert gone(8, 12, 6, 7, last=1, best=2) == [], "12 is the best and counts for none"


# --- what crashes leave --------------------------------------------------------------------------


def of(step: int, round_: int, job: str = JOB) -> Manifest:
    file = manifest.file(0, 1, round_, job)
    shard = Shard(rank=0, file=file, bytes=1, digest=1)
    return Manifest(job=job, sequence=1, round=round_, step=step, world_size=1, shards=(shard,))


def file(round_: int, job: str = JOB) -> str:
    return manifest.file(0, 1, round_, job)


def test_what_no_manifest_names_goes_once_something_later_is_committed() -> None:
    newest = of(20, 3)
    listing = {
        20: {manifest.NAME, file(3), file(2)},  # of a round that went back
        10: {file(3), manifest.draft(file(3), "host"), manifest.draft(manifest.NAME, "host")},
        15: {file(2, OTHER)},
        5: set[str](),
    }
    assert leftovers(listing, [newest], newest) == {
        20: [file(2)],
        10: sorted(listing[10]),
        15: [file(2, OTHER)],
        5: [],
    }


def test_what_may_be_written_now_or_is_not_understood_stays() -> None:
    newest = of(20, 3)
    listing = {
        20: {manifest.NAME, file(3), file(4), "notes"},
        10: {file(4), "notes"},  # a later round is at it
        11: {manifest.NAME, file(2)},  # whose manifest cannot be read
        12: {manifest.PIN, file(2)},
        30: {file(3), file(1, OTHER)},
        31: set[str](),
    }
    assert leftovers(listing, [newest], newest) == {}


@given(
    st.dictionaries(
        st.integers(0, 5),
        st.sets(
            st.sampled_from(
                [manifest.NAME, manifest.PIN, "x", file(1), file(2), file(2, OTHER), file(3)]
            )
        ),
    ),
    st.integers(0, 5),
    st.integers(1, 3),
)
def test_nothing_of_a_step_that_is_committed_or_later_goes(
    listing: dict[int, set[str]], step: int, round_: int
) -> None:
    newest = of(step, round_)
    known = [newest, *(of(s, 2) for s in listing if s != step and manifest.NAME in listing[s])]
    for one, names in leftovers(listing, known, newest).items():
        needed = {shard.file for m in known if m.step == one for shard in m.shards}
        assert not needed & set(names)
        assert not {manifest.NAME, manifest.PIN, "x"} & set(names)
        assert set(names) <= listing[one]
        if (round_, step) < (3, one):
            assert file(3) not in names
