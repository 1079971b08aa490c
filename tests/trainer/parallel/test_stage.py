"""What a pipeline's stage has received is not held longer than a leaf is under way."""

from pathlib import Path

from tests.trainer import forks
from tests.trainer.parallel.holding import COUNTS, SIZES


def test_what_stages_hold_does_not_grow_with_the_number_of_leaves(tmp_path: Path) -> None:
    told = forks.told("tests.trainer.parallel.holding", tmp_path, SIZES)
    few, many = COUNTS
    for name, ranks in told.items():
        for found in ranks:
            assert found["afterwards"] == 0, name
            assert found[f"evaluation of {many}"] == found[f"evaluation of {few}"], (name, found)
            if name != "gpipe":  # whose leaves all are
                assert found[f"training of {many}"] <= found[f"training of {few}"] + 2, (
                    name,
                    found,
                )
    assert max(found[f"training of {many}"] for found in told["gpipe"]) >= many
    assert all(max(found[f"evaluation of {few}"] for found in ranks) > 0 for ranks in told.values())
