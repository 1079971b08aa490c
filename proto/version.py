"""Version numbers of every contract, and which of them work together.

A version is (major, minor). Neighbouring minor versions of one major work together, because an
operator, a master and a training image are never upgraded at the same instant.
"""

import re
from typing import NamedTuple

from elastic.proto.errors import ProtocolMismatch


class Version(NamedTuple):
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


FIRST = Version(1, 0)
"""The first release's, which names none in some places."""

WIRE = Version(1, 0)
"""Messages between agent, elasticctl and master (`master.proto`)."""

JOURNAL = Version(2, 2)
"""Events and snapshots in the master's journal."""

PAGE = Version(1, 1)
"""Layout of a rank's progress page; 1.1: what steps take on the device."""

LINK = Version(1, 0)
"""Messages between a rank and its agent."""


SLOT = Version(1, 1)
"""Layout of a snapshot slot; 1.1: beliefs."""


CHECKPOINT = Version(1, 0)
"""Files of a checkpoint: shards and manifest."""


def parse(text: object) -> Version | None:
    """What `str` of a version says; None where it is none."""
    found = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", text, re.ASCII) if isinstance(text, str) else None
    return Version(int(found[1]), int(found[2])) if found else None


def check(what: str, theirs: Version, ours: Version) -> None:
    """Raise `ProtocolMismatch` unless both sides are neighbours."""
    if theirs.major != ours.major or abs(theirs.minor - ours.minor) > 1:
        which = "older" if ours < theirs else "newer"
        raise ProtocolMismatch(
            f"{what} speaks version {theirs}, this side {ours}, which is {which}: install releases "
            "whose minor versions are neighbours"
        )


def check_stored(what: str, theirs: Version, ours: Version) -> None:
    """Raise `ProtocolMismatch` unless what is on storage can be read: older minor versions for ever,
    and the next newer one."""
    if theirs.major != ours.major or theirs.minor > ours.minor + 1:
        raise ProtocolMismatch(
            f"{what} speaks version {theirs}, this release reads {ours.major}.0 to "
            f"{ours.major}.{ours.minor + 1}: install one that reads {theirs}"
        )
