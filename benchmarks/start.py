"""Launch to the first line of a rank, launchers taken in turn."""

from collections.abc import Sequence

from benchmarks.jobs import SCRIPTS, Job, Launcher
from benchmarks.table import Row, Sample

BOUND_S = 60.0


def once(launcher: Launcher, sample: Sample) -> None:
    """One launch."""
    with Job() as job:
        job.launch(launcher, ["--standalone", "--nproc_per_node=1", str(SCRIPTS / "first_line.py")])
        why = job.until(lambda: bool(job.events()), BOUND_S)
        if why is None:
            sample.add(job.events()[0].at - job.started[0])
        else:
            sample.fail(why)


def rows(ours: Launcher | None, peers: Sequence[Launcher], n: int) -> list[Row]:
    """`n` launches of each, one of each at a time."""
    samples = {launcher: Sample(launcher=launcher.name) for launcher in (ours, *peers) if launcher}
    for _ in range(n):
        for launcher, sample in samples.items():
            once(launcher, sample)
    return [
        Row(
            measure="launch to a rank's first line",
            ours=samples[ours] if ours else None,
            peers=[samples[peer] for peer in peers],
        )
    ]
