"""Where a run's state is kept, and when it ends early, under Megatron's names. Pure."""

from dataclasses import dataclass
from pathlib import Path

from elastic.checkpoint.storage.protocol import canonical, folder
from elastic.proto.errors import UsageError
from elastic.trainer.arguments.options import flag_of, spelled


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFlags:
    """Checkpoints, and ends before the last step."""

    save: str | None = None
    """Folder of the run's checkpoints; it goes on from the newest in it."""
    load: str | None = None
    """Folder that it begins from if there is none in --save; as a rule the same."""
    save_interval: int | None = spelled(None, "--persistent-save-interval")
    """Steps between checkpoints on storage; every step is kept in memory, the last on storage, too."""
    keep: int | None = None
    """Checkpoints on storage that are kept, the newest; if not given all."""
    ckpt_step: int | None = None
    """The step of --load that is taken; if not given the newest."""
    finetune: bool = False
    """Take only the weights of --load, and begin at step 0."""
    no_load_optim: bool = False
    """Do not take the optimizer's state of --load."""
    other_conditions: bool = False
    """Go on with --reduction exact though layout, micro-batch, threads, device, torch or --reduction are
    others than the checkpoint's: with other bits from there on."""
    exit_on_missing_checkpoint: bool = False
    """End where --load has no checkpoint, in place of beginning from first weights."""
    exit_interval: int | None = None
    """End, saved, after a step that is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """End, saved, after so many minutes."""

    def __post_init__(self) -> None:
        for name in (
            "save_interval",
            "keep",
            "ckpt_step",
            "exit_interval",
            "exit_duration_in_mins",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{flag_of(name)} is above 0, not {value}")
        for name in ("ckpt_step", "finetune", "no_load_optim", "exit_on_missing_checkpoint"):
            if getattr(self, name) and self.load is None:
                raise UsageError(f"{flag_of(name)} wants --load: say what to begin from")
        for name in ("ckpt_step", "finetune", "no_load_optim"):
            if getattr(self, name) and self.goes_on:
                raise UsageError(
                    f"{flag_of(name)} is of what a run begins from, and it goes on from the newest in --save, "
                    "which is --load here: give another --save"
                )
        for name in ("keep", "other_conditions"):
            if getattr(self, name) and self.save is None:
                raise UsageError(f"{flag_of(name)} wants --save: say where to save")

    @property
    def goes_on(self) -> bool:
        """Whether --load is what --save is: there is nothing else to begin from."""
        if self.load is None or self.save is None:
            return False
        return canonical(self.load) == canonical(self.save)

    @property
    def folder(self) -> Path | None:
        """`save`, as a folder; None where it is a URL."""
        return None if self.save is None else folder(self.save)
