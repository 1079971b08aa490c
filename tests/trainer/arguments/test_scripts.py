"""Megatron's own GPT-3 examples start with their arguments unchanged, as flags and as YAML."""

from pathlib import Path

import pytest
import yaml

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.parse import parse
from elastic.trainer.arguments.settings import Settings
from tests.trainer.arguments.scripts import LANGUAGE_MODEL, MODEL_PARALLEL, SCRIPTS, TRAINING


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_argument_of_an_example_is_refused(script: str) -> None:
    settings = parse(SCRIPTS[script].split())
    assert settings.schedules.steps() > 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_the_same_as_yaml(script: str, tmp_path: Path) -> None:
    words = SCRIPTS[script].split()
    said: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            said[word[2:].replace("-", "_")] = []
        else:
            said[list(said)[-1]].append(word)
    values = {
        name: [yaml.safe_load(one) for one in given] if len(given) > 1 else yaml.safe_load(given[0])
        if given else True
        for name, given in said.items()
    }  # fmt: skip
    file = tmp_path / "script.yaml"
    file.write_text(yaml.safe_dump(values))
    assert parse(["--yaml-cfg", str(file)]) == parse(words)


def test_the_example_of_175b_is_what_it_says() -> None:
    settings = parse(SCRIPTS["gpt3/train_gpt3_175b_distributed.sh, 2025"].split())
    layout, config = settings.parallel(), settings.config(vocab_size=50304)
    assert (layout.tp, layout.pp, layout.zero, layout.virtual) == (8, 16, 0, 1)
    hidden, layers = 12288, 96
    assert config.parameter_count == (
        12 * layers * hidden**2 + 13 * layers * hidden + 2 * hidden + (50304 + 2048) * hidden
    )
    sizes = settings.schedules.batch_sizes()
    assert (sizes.at(0), sizes.largest) == (16, 1536)
    assert settings.schedules.steps() == 500_000


def example(tmp_path: Path) -> Path:
    """Megatron's gpt_config.yaml."""
    found = yaml.safe_load("{" + TRAINING + "}") | {
        "language_model": yaml.safe_load("{" + LANGUAGE_MODEL + "}"),
        "model_parallel": yaml.safe_load("{" + MODEL_PARALLEL + "}"),
    }
    file = tmp_path / "gpt_config.yaml"
    file.write_text(yaml.safe_dump(found))
    return file


DATA = "--data-path corpus_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model t"


def from_example(tmp_path: Path, more: str = "") -> Settings:
    return parse(["--yaml-cfg", str(example(tmp_path)), *DATA.split(), *more.split()])


def test_megatrons_yaml_with_its_sections(tmp_path: Path) -> None:
    settings = from_example(tmp_path)
    config = settings.config(vocab_size=32000)
    assert (config.activation, config.position, config.rotary_percent) == ("swiglu", "rope", 0.5)
    assert (config.bias, config.tied, config.seq_length) == (False, False, 4096)
    assert settings.optimizer.precision == "bf16"
    assert settings.schedules.batch_sizes().stages[0] == (0, 32)
    assert settings.schedules.learning_rate().warmup == 81381
    said = " ".join(settings.notes)
    assert "--apply-layernorm-1p has no effect here" in said
    assert "--sequence-parallel has no effect" in said


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    settings = from_example(tmp_path, "--hidden-size 2048 --swiglu false --lr 1e-3")
    assert (settings.model.hidden_size, settings.model.swiglu) == (2048, False)
    assert (settings.schedules.lr, settings.schedules.min_lr) == (1e-3, 2.5e-5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "num_layers: 4\nnum_experts: 8",
            r"a\.yaml: --num-experts is Megatron's, and refused here: mixture",
        ),
        (
            "num_layer: 4",
            r"--yaml-cfg .*a\.yaml: there is no argument --num-layer: did you mean --num-l",
        ),
        ("language_model: {moe_router_topk: 8}", "--moe-router-topk is Megatron's, and refused"),
        ("deep: {num_layers: 4}", "deep is no section"),
        ("[1, 2]", "is no mapping"),
        (
            "language_model: {num_layers: 2}\nnum_layers: 3",
            "gives num_layers twice, as 2 and as 3: leave one of them",
        ),
        (
            "norm_epsilon: 1.0e-6\nlanguage_model: {layernorm_epsilon: 1.0e-5}",
            "gives norm_epsilon twice, as 1e-06 and as 1e-05",
        ),
        ("a: b: c", "is no YAML: mapping values are not allowed"),
        ("swiglu: 3", "3 is neither true nor false"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=why) as raised:
        parse(["--yaml-cfg", str(file)])
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        parse([f"--yaml-cfg={tmp_path / 'none.yaml'}"])
