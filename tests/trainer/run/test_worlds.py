"""In exact mode no number of replicas, and no schedule, changes a bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.run.worlds import ALIKE, STEPS, WORLDS, size

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.xdist_group("worlds")  # one run for all of them


class Told:
    """What the ranks of each world ended with."""

    def __init__(self, folder: Path) -> None:
        self.ranks = {
            name: [
                json.loads((folder / f"{name}.{rank}.json").read_text())
                for rank in range(size(world))
            ]
            for name, world in WORLDS.items()
        }

    def steps(self, name: str) -> list[str]:
        """Loss and norm of each step, as all of its ranks have them."""
        ((*steps,),) = {tuple(one["steps"]) for one in self.ranks[name]}
        return steps

    def parameters(self, name: str) -> dict[str, str]:
        """Digests, as all ranks that have a parameter have it."""
        found: dict[str, str] = {}
        for one in self.ranks[name]:
            for parameter, digest in one["parameters"].items():
                assert found.setdefault(parameter, digest) == digest, f"{name}: {parameter}"
        return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("worlds")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.run.worlds", folder],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Told(folder)


def test_each_world_is_compared_with_another() -> None:
    assert set.union(*ALIKE) == WORLDS.keys()


@pytest.mark.parametrize("alike", ALIKE, ids=lambda alike: min(alike))
def test_losses_norms_and_parameters_are_the_same_bits(told: Told, alike: set[str]) -> None:
    first, *others = sorted(alike)
    assert len(set(told.steps(first))) == STEPS, "it trains"
    for other in others:
        assert told.steps(other) == told.steps(first), other
        assert told.parameters(other) == told.parameters(first), other


def test_what_is_tied_over_stages_stays_the_same(told: Told) -> None:
    found = told.parameters("pp2-dp2")
    assert found["head.weight"] == found["embedding.words.weight"]
