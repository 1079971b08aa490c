"""What was saved under each layout goes on under others as if it had been theirs."""

from pathlib import Path

import pytest

from elastic.trainer.model.gpt import GPT
from tests.trainer import forks
from tests.trainer.run.moves import CONFIG, MOMENTS, SIZES, WORLDS, loads


@pytest.mark.parametrize(
    "everything",
    [
        pytest.param(False, id="two-of-each"),
        pytest.param(True, id="all", marks=pytest.mark.soak),
    ],
)
def test_what_is_loaded_has_the_same_bits_and_goes_on_with_the_same_loss(
    tmp_path: Path, everything: bool
) -> None:
    words = ("all",) if everything else ()
    told = forks.told("tests.trainer.run.moves", tmp_path, SIZES, *words)
    parameters = {name for name, _ in GPT(CONFIG).named_parameters()}
    wanted = (
        parameters | {f"{name} {moment}" for name in parameters for moment in MOMENTS} | {"tops"}
    )
    wrong = []
    for name in WORLDS:
        for saved in loads(name, everything=everything):
            found = [rank[saved] for rank in told[name]]
            wrong += [f"{saved} to {name}: {x} differs" for one in found for x in one["differ"]]
            wrong += [
                f"{saved} to {name}: loss, {one['loss']}" for one in found if not one["loss"] < 1e-6
            ]
            names = {x for one in found for x in one["names"]}
            assert names >= wanted, f"{saved} to {name} has no {wanted - names}"
    assert wrong == []
