"""What is deleted: never the newest, never what is pinned, never what somebody may still need."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.retention import Stored, leftovers, spent
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


@given(steps(), rules)
def test_the_newest_and_what_is_pinned_stay(stored: list[Stored], rules: Retention) -> None:
    gone = spent(stored, rules)
    assert not {one.step for one in stored if one.pinned} & set(gone)
    if stored:
        assert max(stored, key=lambda one: one.sequence).step not in gone
    if rules == Retention(highest=rules.highest):
        assert gone == []


@given(steps(), rules)
def test_what_a_rule_keeps_stays_and_all_else_goes(stored: list[Stored], rules: Retention) -> None:
    gone = set(spent(stored, rules))
    newest_first = sorted(stored, key=lambda one: -one.sequence)
    last = {one.step for one in newest_first[: rules.last]}
    every = {one.step for one in stored if rules.every and one.step % rules.every == 0}
    pinned = {one.step for one in stored if one.pinned}
    assert not (last | every | pinned) & gone
    valued = [one for one in stored if one.value is not None]
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
        newest = {one.step for one in newest_first[:1]}
        kept = {one.step for one in stored} - gone - last - every - pinned - newest
        assert len(kept) <= rules.best


@given(steps(), rules)
def test_deleting_once_is_enough(stored: list[Stored], rules: Retention) -> None:
    gone = spent(stored, rules)
    assert spent([one for one in stored if one.step not in gone], rules) == []


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
