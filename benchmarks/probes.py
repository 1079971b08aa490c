"""A probe of this node: seconds from nothing and with torch imported ahead, what they went into, and what it found."""

import asyncio
import os
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path

from benchmarks.table import Row, Sample
from elastic.agent.probes.run import Prober, devices
from elastic.agent.probes.verdicts import NodeVerdict

SCALES = {"tflops": ("GFLOP/s", 1e3), "gb_s": ("MB/s", 1e3)}
"""Units that need no decimals, by the end of a figure's name."""


def rows(level: str, n: int, folder: Path) -> list[Row]:
    """`n` of each in turn; the figures are those of every device and every time."""
    cold, warm = (Sample(launcher=name) for name in ("cold", "torch imported"))
    gone = Sample(launcher="torch imported, its processes gone")
    figures: dict[tuple[str, str], Sample] = {}
    parts: dict[bool, dict[str, tuple[Sample, Sample]]] = {False: {}, True: {}}
    for _ in range(n):
        for sample, prepare in ((cold, False), (warm, True)):
            verdict, whole = asyncio.run(_once(level, folder, prepare=prepare))
            if verdict.faults:
                sample.fail(verdict.what)
                continue
            sample.add(verdict.seconds)
            if prepare:
                gone.add(whole)
            _take(figures, verdict)
            _take_parts(parts[prepare], verdict)
    place = f"probe, {level}, of {len(devices(os.environ))} devices"
    found = [Row(measure=place, ours=warm, peers=[gone, cold])]
    grouped = defaultdict(list)
    for (probe, _), sample in figures.items():
        grouped[probe].append(sample)
    found += [Row(measure=probe, ours=None, peers=samples) for probe, samples in grouped.items()]
    for prepare, words in ((False, "cold"), (True, "torch imported")):
        pairs = sorted(parts[prepare].values(), key=lambda pair: pair[1].quantile(0.5) or 0.0)
        found.append(Row(measure=f"{words}: parts", ours=None, peers=[*chain(*pairs)]))
    return found


async def _once(level: str, folder: Path, *, prepare: bool) -> tuple[NodeVerdict, float]:
    """The verdict, and the seconds until nothing of the probe was left."""
    prober = Prober(level, devices=devices(os.environ), folders=[folder], environ=os.environ)
    if prepare:
        await prober.prepare()
    began = time.monotonic()
    verdict = await prober.probe()
    return verdict, time.monotonic() - began


def _take(figures: dict[tuple[str, str], Sample], verdict: NodeVerdict) -> None:
    for probe in verdict.probes:
        for name, value in probe.figures.items():
            for end, (unit, scale) in SCALES.items():
                if name.endswith(end):
                    key = (probe.probe, name)
                    figures.setdefault(key, Sample(launcher=name, unit=unit)).values.append(
                        value * scale
                    )


def _take_parts(samples: dict[str, tuple[Sample, Sample]], verdict: NodeVerdict) -> None:
    """Of all devices: how long each part took, and when in the probe it was over."""
    for part in verdict.parts:
        new = (Sample(launcher=part.name), Sample(launcher=f"{part.name}, over at"))
        took, over = samples.setdefault(part.name, new)
        took.values.append(part.seconds)
        over.values.append(part.began + part.seconds)
