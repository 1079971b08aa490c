"""Arguments as YAML: Megatron's names, flat, or in the sections of its `gpt_config.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.proto.errors import UsageError

SECTIONS = ("language_model", "model_parallel")
"""Of Megatron's; their names are those of its core, some of which differ from its arguments'."""

_CORE_NAMES: Mapping[str, str] = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}


def read(path: str) -> Mapping[str, Any]:
    """The arguments in a file, by name. Raises `UsageError` where it is none."""
    try:
        import yaml
    except ImportError as error:
        raise UsageError("--yaml-cfg wants PyYAML: pip install elastic-runtime[train]") from error
    try:
        text = Path(path).read_text(encoding="utf-8")
        _check_twice(path, yaml.compose(text, yaml.SafeLoader))
        found = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--yaml-cfg {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--yaml-cfg {path} is no text in UTF-8") from error
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # the last two: of its numbers, its depth
        raise UsageError(f"--yaml-cfg {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise UsageError(f"--yaml-cfg {path} is no mapping of arguments to values")
    return _flat(path, found)


def _check_twice(path: str, node: Any) -> None:
    """A name that is given twice: YAML forbids it, and PyYAML takes the last. node: of its tree."""
    for part in (node, *(value for _, value in _pairs(node))):
        seen: set[str] = set()
        for name, _ in _pairs(part):
            if (plain := name.value.replace("-", "_")) in seen:
                line = name.start_mark.line + 1
                raise UsageError(f"--yaml-cfg {path} gives {plain} twice, again in line {line}")
            seen.add(plain)


def _pairs(node: Any) -> list[Any]:
    return [
        (name, value)
        for name, value in (node.value if getattr(node, "id", "") == "mapping" else ())
        if name.id == "scalar"
    ]


def _flat(path: str, found: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Sections as one, under the arguments' names."""
    flat: dict[str, Any] = {}
    if {"yaml_cfg", "yaml-cfg"} & found.keys():
        raise UsageError(f"--yaml-cfg {path} names another file by yaml_cfg: put all into one")
    for name, value in found.items():
        if name in SECTIONS and isinstance(value, dict):
            for core, one in value.items():
                _put(path, flat, *_argument(str(core), one))
        elif isinstance(value, dict):
            raise UsageError(
                f"--yaml-cfg {path}: {name} is no section; there are {' and '.join(SECTIONS)}, or none"
            )
        else:
            _put(path, flat, str(name).replace("-", "_"), value)
    return flat


def _put(path: str, flat: dict[str, Any], name: str, value: Any) -> None:
    """Not as two values, from two sections or under two names. null is "not given"."""
    before = flat.get(name)
    if before is not None and value is not None and before != value:
        raise UsageError(
            f"--yaml-cfg {path} gives {name} twice, as {before} and as {value}: leave one of them"
        )
    flat[name] = before if value is None else value


def _argument(core: str, value: Any) -> tuple[str, Any]:
    if core == "activation_func" and value in ("swiglu", "gelu"):
        return "swiglu", value == "swiglu" or None
    return _CORE_NAMES.get(core, core), value
