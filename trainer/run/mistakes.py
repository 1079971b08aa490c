"""A user's mistake, told once by all who see the same one."""

import contextlib
import hashlib
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from elastic.proto.env import process_environment


def tell(error: Exception) -> None:
    """One line on stderr, by the first that sees it, since a launcher may end the others: of the world's ranks, and
    before there is a process group, as with a command line, of a node's."""
    if _is_first(str(error)):
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()


def _is_first(message: str) -> bool:
    """True, too, where nobody can say."""
    name = f"told-{hashlib.sha256(message.encode()).hexdigest()[:16]}"
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # whoever had the store is gone
            return _get_default_store().add(name, 1) == 1
    file = process_environment().get("TORCHELASTIC_ERROR_FILE", "")
    try:
        if file:  # attempt_<n>/<rank>/error.json, of this node
            (Path(file).parents[1] / f".{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True
