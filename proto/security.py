"""What proves that two processes belong to one job. Imports no grpc."""

from dataclasses import dataclass
from pathlib import Path

TOKEN_KEY = "elastic-token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    token: str = ""
    """Shared by all of one job; empty: none."""
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TOKEN_KEY, self.token),) if self.token else ()
