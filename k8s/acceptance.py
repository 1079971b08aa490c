"""From a job's spec to what it is to be: `status.accepted`, or why it stays what it was. Pure."""

import hashlib
import json
from dataclasses import replace

from elastic.k8s import pods, status
from elastic.k8s.jobs import Answers, Job
from elastic.k8s.pods import Manifest, Owner
from elastic.k8s.rules import edit_violations, violations
from elastic.k8s.spec import Spec
from elastic.k8s.spec import read as read_spec
from elastic.k8s.status import Reason, Verdict
from elastic.k8s.supply import New
from elastic.proto import schema
from elastic.proto.elasticjob import Accepted


def accept(
    seen: Job, answers: Answers, *, again: bool
) -> tuple[Accepted | None, Verdict, Manifest | None]:
    """What the job is to be; whether that is what its spec says; a pod to ask about first. again: ask also about one
    that the server has refused."""
    before = seen.told.accepted
    if before is not None and (before.generation == seen.generation or seen.deleted_at is not None):
        return before, Verdict(so=True, reason=Reason.ACCEPTED), None
    kept = _suspended(before) if seen.spec.get("suspend") is True else before
    refused = violations(seen.owner.name, seen.spec)
    if refused:
        return kept, Verdict(so=False, reason=Reason.INVALID, message="; ".join(refused)), None
    spec = read_spec(seen.spec)
    old = None if before is None else read_spec(before.spec)
    if old is not None and (refused := edit_violations(old, spec)):
        return kept, Verdict(so=False, reason=Reason.EDIT, message="; ".join(refused)), None
    if old is None or _worker(seen.owner, old) != _worker(seen.owner, spec):
        template = answers.template if again or answers.template is not None else _refused(seen)
        if template is None and answers.unasked:
            return kept, Verdict(so=None, reason=Reason.CHECKING, message=answers.unasked), None
        if template is None:
            return before, Verdict(so=None, reason=Reason.CHECKING), _worker(seen.owner, spec)
        if template:
            return kept, Verdict(so=False, reason=Reason.TEMPLATE, message=template), None
    return _accepted(seen, before, spec), Verdict(so=True, reason=Reason.ACCEPTED), None


def _refused(seen: Job) -> str | None:
    """What the server said of this very spec's pod, if it did not take it."""
    said = seen.told.condition(status.Kind.ACCEPTED)
    same = said is not None and said.observed_generation == seen.generation
    return said.message if said and same and said.reason == Reason.TEMPLATE else None


def _suspended(before: Accepted | None) -> Accepted | None:
    """That is done whatever else an edit asks for."""
    if before is None or before.wanted != "Run":
        return before
    return replace(before, wanted="Suspend", spec={**before.spec, "suspend": True})


def _accepted(seen: Job, before: Accepted | None, spec: Spec) -> Accepted:
    fresh = Accepted(
        generation=seen.generation,
        spec=schema.dump(spec),
        wanted="Suspend" if spec.suspend else "Run",
    )
    if before is None or before.wanted == fresh.wanted:
        return fresh if before is None else replace(fresh, attempt=before.attempt)
    if before.wanted == "Stop":
        return replace(fresh, wanted="Stop", attempt=before.attempt)
    if fresh.wanted == "Suspend" or seen.told.start_time is None:
        return replace(fresh, attempt=before.attempt)
    if not seen.told.holds(status.Kind.SUSPENDED):
        return before  # it saves: it goes on once that is done
    return replace(fresh, attempt=before.attempt + 1)


def _worker(owner: Owner, spec: Spec) -> Manifest:
    """A worker's pod as a dry run takes it; how many there are is not its matter."""
    same = replace(
        spec,
        worker=replace(spec.worker, replicas=1),
        elastic=replace(spec.elastic, min=1, max=1),
        hot_spares=replace(spec.hot_spares, count=0),
    )
    found = pods.worker(owner, same, New(slot=0, attempt=0), ())
    found["metadata"] = {**found["metadata"], "name": f"{owner.name}-check"}
    return found


def made_from(owner: Owner, spec: Spec) -> str:
    """Of a master's pod: two of them are alike whose specs differ in nothing that it rests on."""
    text = json.dumps(pods.master(owner, spec, 0), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
