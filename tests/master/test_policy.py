"""What cannot be asked for."""

import pytest

from elastic.master.policy import Policy


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_nodes": 0},
        {"min_nodes": 3, "max_nodes": 2},
        {"node_unit": 0},
        {"rank_unit": 0},
        {"min_nodes": 5, "max_nodes": 7, "node_unit": 4},
        {"lease": -1.0},
        {"settle": -0.1},
        {"max_restarts": -1},
        {"fault_budget": -1},
        {"same_failure_limit": 0},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"want|no multiple"):
        Policy(**wrong)  # type: ignore[arg-type]


def test_the_defaults_are_torchruns() -> None:
    policy = Policy()
    assert (policy.min_nodes, policy.max_nodes, policy.max_restarts) == (1, 1, 0)
