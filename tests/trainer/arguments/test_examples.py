"""The configurations in examples/gpt: sizes, tokens, and worlds that they run in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.trainer.arguments.parse import parse
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.run import begin

FOLDER = Path(__file__).parents[3] / "examples" / "gpt"
WORDS = 50304
"""GPT-2's, padded."""

SIZES = {
    "125m": (12, 768, 0.125e9), "350m": (24, 1024, 0.35e9), "1.3b": (24, 2048, 1.3e9),
    "6.7b": (32, 4096, 6.7e9), "13b": (40, 5120, 13e9), "22b": (48, 6144, 22e9),
    "175b": (96, 12288, 175e9),
}  # fmt: skip
"""Layers, hidden size, parameters."""

WORLDS = {
    "125m": (1, 2, 4), "350m": (1, 4, 8), "1.3b": (4, 8), "1.3b-pp4": (4, 16), "6.7b": (4, 8),
    "13b-pp4": (16,), "13b-pp8": (32,), "13b-pp4-tp4": (64,), "22b": (16,), "175b": (128, 1024),
}  # fmt: skip
"""Of each configuration; the numbers of replicas between them will do as well."""


def read(name: str) -> Settings:
    file = str(FOLDER / f"{name}.yaml")
    return parse(["--yaml-cfg", file, "--data-path", "p", "--vocab-size", "50256", "--save", "s"])


def test_each_is_in_the_table() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(WORLDS)
    assert {name.split("-")[0] for name in WORLDS} == set(SIZES)


@pytest.mark.parametrize("name", WORLDS)
def test_a_configuration_has_its_size_and_its_tokens(name: str) -> None:
    settings = read(name)
    config = settings.config(vocab_size=WORDS)
    layers, hidden, parameters = SIZES[name.split("-")[0]]
    assert (config.num_layers, config.hidden_size) == (layers, hidden)
    count = 12 * layers * hidden**2 + 13 * layers * hidden + 2 * hidden
    count += (WORDS + config.seq_length) * hidden
    assert config.parameter_count == count
    assert f": {count:,} parameters" in (FOLDER / f"{name}.yaml").read_text()
    assert count == pytest.approx(parameters, rel=0.04)
    if name == "22b":
        assert settings.schedules.steps() == 100
    else:
        tokens = (settings.schedules.train_samples or 0) * config.seq_length
        assert tokens == pytest.approx(20 * parameters, rel=1e-5)


@pytest.mark.parametrize("name", WORLDS)
def test_a_configuration_fits_its_worlds(name: str) -> None:
    settings = read(name)
    layout = settings.parallel()
    settings.config(vocab_size=WORDS).check_split(layout.tp)
    assert settings.notes == ()
    for world in WORLDS[name]:
        settings.layout.check_world(world)
        replicas = world // (layout.tp * layout.pp)
        leaves = begin.plan_of(settings, layout).cut(settings.schedules.global_batch_size or 0)
        assert leaves.waste(replicas) == 0


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("125m", "13b-pp4-tp4"), id="two"),
        pytest.param(tuple(WORLDS), id="all", marks=pytest.mark.soak),
    ],
)
def test_configurations_run_dry_at_their_true_sizes_on_fake_ranks(names: tuple[str, ...]) -> None:
    files = [f"{FOLDER / name}.yaml:{min(WORLDS[name])}" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.arguments.dry", *files],
        cwd=FOLDER.parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
