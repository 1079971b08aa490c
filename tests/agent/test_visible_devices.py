"""Beside what torch itself makes of the variable, which test_slots.py asks."""

import pytest

from elastic.agent.visible_devices import visible_devices

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("3, 0", ["3", "0"]),
        ("1,9,2", ["1"]),
        ("1,1", []),
        ("GPU-cc44,GPU-aa11", ["3", "0"]),
        ("GPU-b", ["2"]),
        ("GPU-aa", []),  # two begin so
        ("GPU-aa11,GPU-aa1", []),  # the same one twice
        ("GPU-aa11,GPU-zz,GPU-bb33", ["0"]),
        ("MIG-1/2/3,MIG-5", ["MIG-1/2/3", "MIG-5"]),
    ],
)
def test_which_they_are(visible: str | None, names: list[str]) -> None:
    assert visible_devices(visible, UUIDS) == names


def test_a_uuid_is_believed_where_none_is_known() -> None:
    assert visible_devices("GPU-b,GPU-zz", ["", ""]) == ["GPU-b", "GPU-zz"]
    assert visible_devices("GPU-b", []) == []  # of no GPU at all
