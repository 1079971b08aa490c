"""Messages between an agent and its courier, and where a courier serves images to other nodes.

Between the two, over datagrams (`datagrams.py`):

| direction        | message   | descriptor              | meaning                                     |
|------------------|-----------|-------------------------|---------------------------------------------|
| agent to courier | `Hold`    | a slot                  | serve what is in it, from now on            |
|                  | `Serve`   | a socket that listens   | once: where, and to whom, after what it has |
|                  | `Drop`    |                         | no more                                     |
|                  | `Fetch`   | a slot to be filled     | copy another node's image into it           |
|                  | `Forget`  |                         | that fetch is not wanted any more           |
| courier to agent | `Fetched` |                         | it is there, whole and verified             |
|                  | `Failed`  |                         | why not                                     |

To other nodes a courier is a web server. `GET <base>/<checkpoint>/<round>/<step>/<rank>` with one Range
is bytes of the slot that holds that image, header page first (`slot.py`); 410 where no slot does. The
base ends in a random word: who was told it, over the job's own streams, may read. 404 is the answer to
another word, maybe that of a courier before this one.
"""

from dataclasses import dataclass
from urllib.parse import quote

from elastic.proto.moment import Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files in PEM: the same pair on either side, both signed by `ca`."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    secret: str
    tls: Tls | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    name: str
    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    id: int
    base: str
    """Of the courier that has it."""
    checkpoint: str
    round: int
    step: int
    rank: int
    bandwidth: int | None
    """Bytes a second of all fetches together; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    id: int
    error: str
    gone: bool = False
    """It is not there, or not what it was: no use to try again."""


ToCourier = Serve | Hold | Drop | Fetch | Forget
ToAgent = Fetched | Failed


def address(base: str, checkpoint: str, moment: Moment, rank: int) -> str:
    """Where an image is served."""
    return f"{base}/{quote(checkpoint, safe='')}/{moment.round}/{moment.step}/{rank}"
