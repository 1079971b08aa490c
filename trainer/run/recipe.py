"""How a run is trained, as far as that may be changed while it goes on: its bits follow from it, too. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from elastic.trainer.arguments.settings import Settings

Recipe = Mapping[str, Any]


def recipe(settings: Settings) -> dict[str, Any]:
    """What has an effect, in the words of the arguments; numbers of steps as samples."""
    flags, guard = settings.optimizer, settings.guard
    scaling = flags.loss_scaling()
    return {
        **_rate(settings), **_decay(settings),
        "adam-beta1": flags.adam_beta1, "adam-beta2": flags.adam_beta2, "adam-eps": flags.adam_eps,
        "clip-grad": flags.clip_grad, "init-method-std": settings.model.init_method_std,
        **({} if scaling is None else {f"loss-scale {name}": one for name, one in asdict(scaling).items()}),
        **({"guard": "off"} if guard.guard == "off" else {_flag(name): one for name, one in asdict(guard).items()}),
    }  # fmt: skip


def changed(before: object, now: Recipe) -> str:
    """`lr 0.0001 -> 0.0002, ...`; empty where nothing is, or a checkpoint does not say what was before."""
    if not isinstance(before, Mapping):
        return ""
    names = dict.fromkeys((*now, *before))
    pairs = {name: (before.get(name), now.get(name)) for name in names}
    return ", ".join(f"{name} {was} -> {one}" for name, (was, one) in pairs.items() if was != one)


def _rate(settings: Settings) -> dict[str, Any]:
    rate = settings.schedules.learning_rate()
    told: dict[str, Any] = {"lr": rate.lr, "lr-decay-style": rate.style}
    if rate.warmup > 0:
        told |= {"lr-warmup-init": rate.init_lr, "lr-warmup-samples": rate.warmup}
    if rate.style != "constant":
        told |= {"min-lr": rate.min_lr, "lr-decay-samples": rate.decay}
    if rate.style == "WSD":
        told |= {"lr-wsd-decay-style": rate.wsd_style, "lr-wsd-decay-samples": rate.wsd_decay}
    return told


def _decay(settings: Settings) -> dict[str, Any]:
    decay = settings.schedules.decay_of_weights()
    if decay.style == "constant":
        return {"weight-decay": decay.end}
    return {
        "start-weight-decay": decay.start, "end-weight-decay": decay.end,
        "weight-decay-incr-style": decay.style, "samples of its rise": decay.samples,
    }  # fmt: skip


def _flag(name: str) -> str:
    return name.replace("_", "-")
