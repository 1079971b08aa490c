"""The labelled failures under corpus/: what the master heard of each, and what had happened.

`load("known")` is for whoever writes a classifier, `load("held_out")` for who judges it, and for
nobody before; `load("later")` came after it was written. `python -m tests.master.diagnosis.corpus FILE...` adds cases (JSON, one or a list) and
splits anew: which side a case is on follows from its label and a hash of its id.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from elastic.master.diagnosis import Host
from elastic.master.events import Failed, NodeId, RankFailure
from elastic.master.reading import Observed
from elastic.master.symptoms import ACTIONS

FOLDER = Path(__file__).parent / "corpus"
MAX_TEXT = 4096
"""Bytes that the agent keeps of each text of a failure."""

Side = Literal["known", "held_out"]
SIDES: tuple[Side, Side] = ("known", "held_out")
LATER: Literal["later"] = "later"
"""Recorded since there are rules, on no side: on GPUs, and on disks that fail."""

LABELS: Mapping[str, str] = ACTIONS
"""Every label, and what an operator does about it; two that call for the same would be one."""


class CorpusError(Exception):
    """A case is not what this module says a case is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Where it began."""

    node_id: NodeId
    rank: int | None
    """None: the node as a whole, its store or its container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    id: str
    label: str
    culprit: Culprit | None
    """None: no rank and no node, or nobody can tell."""
    source: str
    failures: tuple[Observed, ...]
    """In the order in which the master hears of them; `at` in seconds of the round."""
    hosts: Mapping[NodeId, Host]

    @property
    def culprit_is_first(self) -> bool | None:
        """Whether the first to report is where it began; None where that says nothing."""
        if self.culprit is None or len(self.failures) < 2:
            return None
        first = self.failures[0]
        same = first.node_id == self.culprit.node_id
        return same and self.culprit.rank in (None, first.failure.rank)


def load(side: Side | Literal["later"], folder: Path = FOLDER) -> tuple[Case, ...]:
    """All cases of one side, or those that came later. Raises CorpusError."""
    cases: list[Case] = []
    for path in sorted((folder / side).glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                case = parse(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise CorpusError(f"{path.name}:{number}: {error}") from error
            if case.label != path.stem:
                raise CorpusError(f"{path.name}:{number}: {case.id} is a {case.label}")
            cases.append(case)
    return tuple(cases)


def parse(body: Mapping[str, Any]) -> Case:
    """A case from its JSON. Raises CorpusError, ValueError, TypeError or KeyError."""
    _has_only(body, {"id", "label", "culprit", "source", "failures", "hosts"})
    hosts = {NodeId(name): _host(told) for name, told in body["hosts"].items()}
    failures = tuple(_observed(told) for told in body["failures"])
    culprit = None if body["culprit"] is None else Culprit(**body["culprit"])
    case = Case(
        id=body["id"],
        label=body["label"],
        culprit=culprit,
        source=body["source"],
        failures=failures,
        hosts=hosts,
    )
    _check(case)
    return case


def _observed(told: Mapping[str, Any]) -> Observed:
    values = dict(told)
    node, at = values.pop("node_id"), values.pop("at")
    fields = {field.name for field in dataclasses.fields(RankFailure)}
    _has_only(values, fields - {"kernel_log"})  # a case has that of each host
    failure = RankFailure(**(values | {"what": Failed(values["what"])}))
    return Observed(node_id=NodeId(node), failure=failure, at=float(at))


def _host(told: Mapping[str, Any]) -> Host:
    _has_only(told, {"kernel_log", "container_exit"})
    return Host(kernel_log=tuple(told["kernel_log"]), container_exit=told["container_exit"])


def _has_only(body: Mapping[str, Any], names: set[str]) -> None:
    if set(body) != names:
        raise CorpusError(f"fields {sorted(set(body) ^ names)} are missing or too many")


def _check(case: Case) -> None:
    """What the types do not say. Raises CorpusError."""
    told = [o.failure for o in case.failures]
    texts = [t for f in told for t in (f.error_type, f.message, f.frame, f.log_tail)]
    times = [o.at for o in case.failures]
    nodes = {o.node_id for o in case.failures} | ({case.culprit.node_id} if case.culprit else set())
    exits = [host for host in case.hosts.values() if host.container_exit is not None]
    wrong = {
        "no such label": case.label not in LABELS,
        "no source": not case.source.startswith(("recorded: ", "https://")),
        "nothing was heard": not (case.failures or exits),
        "not in the order of hearing": times != sorted(times),
        "a node that is none of its hosts": not nodes <= set(case.hosts),
        "a text is longer than an agent sends": any(len(t.encode()) > MAX_TEXT for t in texts),
        "a failure without an exit": any(f.exit_code == 0 for f in told),
    }
    if found := [what for what, is_so in wrong.items() if is_so]:
        raise CorpusError(f"{case.id}: {', '.join(found)}")


def split(labels: Mapping[str, str]) -> set[str]:
    """Of cases, label by id, those that are held out: half of each label, by a hash of the id."""
    held: set[str] = set()
    for label in set(labels.values()):
        ids = sorted((id_ for id_ in labels if labels[id_] == label), key=_hash)
        odd = len(ids) % 2 and int(_hash(label), 16) % 2
        held |= set(ids[: len(ids) // 2 + odd])
    return held


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def save(bodies: Iterable[Mapping[str, Any]], folder: Path = FOLDER) -> None:
    """Write them all anew, each on its side, in the file of its label. Raises as `parse` does."""
    all_ = sorted(bodies, key=lambda body: str(body["id"]))
    held = split({parse(body).id: body["label"] for body in all_})
    for side in SIDES:
        (folder / side).mkdir(parents=True, exist_ok=True)
        for path in (folder / side).glob("*.jsonl"):
            path.unlink()
    for body in all_:
        side = "held_out" if body["id"] in held else "known"
        with open(folder / side / f"{body['label']}.jsonl", "a") as file:
            file.write(json.dumps(body) + "\n")


def main(paths: list[str]) -> None:
    bodies = {}
    split_before = [path for side in SIDES for path in (FOLDER / side).glob("*.jsonl")]
    for path in [*sorted(split_before), *map(Path, paths)]:
        text = path.read_text()
        found = [json.loads(x) for x in text.splitlines()] if path.suffix == ".jsonl" else None
        loaded = json.loads(text) if found is None else found
        for body in loaded if isinstance(loaded, list) else [loaded]:
            bodies[body["id"]] = body
    save(bodies.values())


if __name__ == "__main__":
    main(sys.argv[1:])
