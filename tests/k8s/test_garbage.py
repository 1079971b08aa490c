"""Owners and what they own, by tables."""

import pytest

from scripts.kubernetes.garbage import FOREGROUND, ORPHAN, Step, steps
from tests.k8s.cluster import Object


def thing(
    uid: str, *owners: str, deleting: bool = False, finalizers: tuple[str, ...] = ()
) -> Object:
    metadata: Object = {"uid": uid, "finalizers": list(finalizers)}
    metadata["ownerReferences"] = [{"uid": owner} for owner in owners]
    if deleting:
        metadata["deletionTimestamp"] = "now"
    return {"metadata": metadata}


OWNER = thing("owner")
FOREGROUND_OWNER = thing("owner", deleting=True, finalizers=(FOREGROUND, "other"))
ORPHANING_OWNER = thing("owner", deleting=True, finalizers=(ORPHAN,))


@pytest.mark.parametrize(
    ("objects", "wanted"),
    [
        pytest.param({"o": OWNER, "d": thing("d", "owner")}, [], id="owner there"),
        pytest.param({"d": thing("d")}, [], id="owned by nobody"),
        pytest.param({"d": thing("d", "owner")}, [("d", "delete", "")], id="owner gone"),
        pytest.param({"d": thing("d", "owner", deleting=True)}, [], id="already on its way"),
        pytest.param({"o": OWNER, "d": thing("d", "owner", "gone")}, [], id="one of two there"),
        pytest.param(
            {"o": FOREGROUND_OWNER, "d": thing("d", "owner")},
            [("d", "foreground", "")],
            id="foreground",
        ),
        pytest.param(
            {"o": FOREGROUND_OWNER, "d": thing("d", "owner", deleting=True)},
            [],
            id="foreground waits for what it owns",
        ),
        pytest.param(
            {"o": FOREGROUND_OWNER}, [("o", "release", FOREGROUND)], id="foreground is done"
        ),
        pytest.param(
            {"o": ORPHANING_OWNER, "d": thing("d", "owner")},
            [("d", "disown", "owner")],
            id="orphan",
        ),
        pytest.param({"o": ORPHANING_OWNER}, [("o", "release", ORPHAN)], id="orphans are free"),
    ],
)
def test_steps(objects: dict[str, Object], wanted: list[tuple[str, str, str]]) -> None:
    expected = [
        Step(path=path, uid=objects[path]["metadata"]["uid"], verb=verb, argument=argument)
        for path, verb, argument in wanted
    ]
    assert steps(objects) == expected
