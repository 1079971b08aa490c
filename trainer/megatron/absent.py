"""What a script may import of Megatron, and must not use: one line says so, where it is used.

A script imports much that its arguments never lead to. So the names of features that are not here can be
imported, and raise `UsageError` where they are called or inherited from. All other names and modules raise
`ImportError`, as Megatron's own do for what is not installed, so that `try: ... except ImportError` works.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from elastic.proto.errors import UsageError

PACKAGE = "elastic.trainer.megatron"
PAGE = "docs/trainer-megatron.md lists what is here"

_SPECS = "there is one model: leave --spec out, and build GPTModel from a spec of gpt_layer_specs"
_OTHERS = "there is one model, GPTModel"
_PACKED = "samples are not packed: attention is causal"
_TOKENIZER = "take get_tokenizer()"
_DATA = "see --data-path, --train-data-path and --mock-data"
_YAML = "--yaml-cfg is read before the script is asked: take core_transformer_config_from_args"

_NAMES: Mapping[str, tuple[str, str]] = {
    "core.models.gpt.gpt_layer_specs": (
        "get_gpt_mtp_block_spec get_mlp_module_spec get_gpt_layer_with_inference_spec",
        "multi-token prediction, experts and inference have no specs: leave their arguments out",
    ),
    "core.models.gpt.heterogeneous.heterogeneous_layer_specs": (
        "get_gpt_heterogeneous_layer_spec", "all layers have one shape",
    ),
    "core.models.gpt.experimental_attention_variant_module_specs": (
        "get_transformer_block_with_experimental_attention_variant_spec", _SPECS,
    ),
    "core.models.mamba": ("MambaModel", _OTHERS),
    "core.transformer.spec_utils": ("ModuleSpec build_module import_module", _SPECS),
    "core.transformer.transformer_block": ("TransformerBlockSubmodules", _SPECS),
    "core.transformer.transformer_config": (
        "TransformerConfig MLATransformerConfig",
        "the model's shape follows from the arguments: take core_transformer_config_from_args",
    ),
    "core.packed_seq_params": ("PackedSeqParams", _PACKED),
    "core.tokenizers.text.utils.build_tokenizer": ("build_tokenizer", _TOKENIZER),
    "core.tokenizers.utils.build_tokenizer": ("build_tokenizer", _TOKENIZER),
    "core.utils": (
        "get_thd_batch_on_this_cp_rank get_batch_on_this_hybrid_cp_rank", _PACKED,
    ),
    "legacy.model": ("GPTModel", "take megatron.core.models.gpt.GPTModel"),
    "training.datasets.fim_dataset": ("GPTFIMDataset GPTFIMDatasetConfig", _DATA),
    "training.datasets.sft_dataset": ("SFTDataset", _DATA),
    "training.yaml_arguments": ("core_transformer_config_from_yaml", _YAML),
}  # fmt: skip
"""Names by their module in Megatron, and what there is instead."""


class Missing(UsageError, AttributeError):
    """A name that a module has in Megatron, or nowhere."""


def attributes(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__`: names that may be imported, and a line for others."""

    def found(name: str) -> Any:
        known, instead = _NAMES.get(_in_megatron(module), ("", ""))
        if name in known.split():
            return _stand_in(f"{_in_megatron(module)}.{name}", instead)
        raise Missing(f"megatron.{_in_megatron(module)}.{name} is not here: {PAGE}")

    return found


def install() -> None:
    """Have modules of `_NAMES` be found, and what this package raises be told in one line."""
    sys.meta_path.append(_Finder())
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        line = _line(error)
        if line is None:
            previous(kind, error, trace)
        else:
            sys.stderr.write(f"{line}\n")

    sys.excepthook = excepthook


def _line(error: BaseException) -> str | None:
    """What is said of an error that nobody caught; None: it is not ours."""
    if isinstance(error, ImportError) and str(error.name).startswith(f"{PACKAGE}."):
        module = f"megatron.{_in_megatron(str(error.name))}"
        if isinstance(error, ModuleNotFoundError):
            return f"{module} is not here: {PAGE}"
        return f"{module} does not have all of what is imported: {error.msg}; {PAGE}"
    return str(error) if isinstance(error, UsageError) else None


class _Finder:
    """On `sys.meta_path`, behind those that find files."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        inner = _in_megatron(name)
        is_package = any(module.startswith(f"{inner}.") for module in _NAMES)
        if not name.startswith(f"{PACKAGE}.") or not (is_package or inner in _NAMES):
            return None
        return ModuleSpec(name, _Maker(), is_package=is_package)


class _Maker(Loader):
    """Makes a module of stand-ins."""

    def exec_module(self, module: ModuleType) -> None:
        if _in_megatron(module.__name__) in _NAMES:
            vars(module)["__getattr__"] = attributes(module.__name__)


def _in_megatron(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.")


def _stand_in(name: str, instead: str) -> type:
    """A class, so that it may stand in annotations."""

    def refuse(*given: object, **named: object) -> NoReturn:
        raise UsageError(f"megatron.{name} is not here: {instead}")

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__init_subclass__": refuse})
