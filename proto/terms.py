"""How a script wants its checkpoint kept on storage: told by its ranks, kept by the agent for those who
come after it, used by the flusher. The master never hears of it, and nobody logs it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which steps stay on storage, beside the newest and those that are pinned: what any rule keeps.
    Without a rule, all do. Void steps are counted by none."""

    last: int = 0
    """So many that were committed last."""
    every: int = 0
    """Those whose number is a multiple of it."""
    best: int = 0
    """So many with the best values."""
    highest: bool = False
    """The best value is the highest, not the lowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    storage_options: str = field(default="{}", repr=False)
    """What the storage's driver is given, such as credentials: a JSON object."""
    retention: Retention = Retention()
