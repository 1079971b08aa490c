"""What is thought of a node, by what its probes said. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from elastic.agent.probes.answers import Answer

State = Literal["ok", "faulty", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeVerdict:
    probe: str
    device: str
    """`gpu0`, `cpu`, a folder; empty: the whole node."""
    state: State
    what: str = ""
    """What is wrong, or why nothing is known; empty where all is well."""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that takes time in a probe of a node."""

    name: str
    """A step, `device`, or what is in it, `device: context`."""
    device: str
    """As in `ProbeVerdict`."""
    began: float
    """Seconds since the node's probe began; less than 0: it was prepared before."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    level: str
    probes: tuple[ProbeVerdict, ...]
    seconds: float
    """That it took, until all was known."""
    parts: tuple[Part, ...] = ()
    """What these went into, and how long its processes took to be gone, as they began."""

    @property
    def state(self) -> State:
        """faulty if any probe is, ok if any is ok: what nobody knows is no fault."""
        states = {probe.state for probe in self.probes}
        return "faulty" if "faulty" in states else "ok" if "ok" in states else "unknown"

    @property
    def faults(self) -> tuple[ProbeVerdict, ...]:
        return tuple(probe for probe in self.probes if probe.state == "faulty")

    @property
    def what(self) -> str:
        """Every fault, in one line."""
        return "; ".join(": ".join(filter(None, (f.probe, f.device, f.what))) for f in self.faults)


def of_answer(answer: Answer, device: str) -> ProbeVerdict:
    state: State = "faulty" if not answer.ok else "ok" if answer.figures else "unknown"
    return ProbeVerdict(
        probe=answer.probe, device=device, state=state, what=answer.what, figures=answer.figures
    )


def compared(verdicts: Sequence[ProbeVerdict]) -> tuple[ProbeVerdict, ...]:
    """The same, with what only a look at a node's other devices tells."""
    checksums = _figures(verdicts, "matmul", "checksum")
    odd = odd_checksums(checksums)
    links = _figures(verdicts, "nvml", "nvlinks_active")
    switched = any(_figures(verdicts, "nvml", "nvlinks_switched").values())
    fewer = fewer_links(links, switched=switched)
    found = []
    for verdict in verdicts:
        words = {"matmul": odd, "nvml": fewer}.get(verdict.probe, {}).get(verdict.device)
        if words and verdict.state == "ok":
            verdict = replace(verdict, state="faulty", what=words)
        found.append(verdict)
    return tuple(found)


def odd_checksums(checksums: Mapping[str, float]) -> dict[str, str]:
    """Devices whose result is not that of most; by device, in words.

    The product is exact in whatever order it is summed (`matmul.py`), so all have the same bits. No
    majority, nobody is accused.
    """
    ranked = Counter(checksums.values()).most_common(1)
    if not ranked or 2 * ranked[0][1] <= len(checksums):
        return {}
    usual, count = ranked[0]
    return {
        device: f"its product has checksum {own:.0f}, that of the {count} others is {usual:.0f}"
        for device, own in checksums.items()
        if own != usual
    }


def fewer_links(active: Mapping[str, float], *, switched: bool) -> dict[str, str]:
    """Devices with fewer active NVLinks than another of the node: boards have links that lead nowhere,
    but all of a node have as many; but cards that bridges join, where one may have none. switched: links lead to switches."""
    most = max(active.values(), default=0.0)
    return {
        device: f"{own:.0f} NVLinks are active, another GPU has {most:.0f}"
        for device, own in active.items()
        if own < most and (own or switched)
    }


def _figures(verdicts: Sequence[ProbeVerdict], probe: str, name: str) -> dict[str, float]:
    return {v.device: v.figures[name] for v in verdicts if v.probe == probe and name in v.figures}
