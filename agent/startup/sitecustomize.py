"""First on the PYTHONPATH of ranks: runs at the start of every Python below them.

It takes its own folder off `sys.path`, readies `elastic/agent/hook.py` in the process that is (or
may become) the rank, and gives way to the sitecustomize that would have run without it. In any
other process it only looks at one number, in less than a millisecond. See docs on differences: the
script's PYTHONPATH keeps this folder, so that Python programs below a shell script find it.
"""

import os
import sys


def _owned_by_another() -> bool:
    """Whether the page in our environment is missing, or another process that lives has it."""
    # As proto/page.py has it, in place: an import of that would cost more than all of this.
    try:
        fd = int(os.environ["ELASTIC_PAGE_FD"])  # noqa: TID251 - the hook is not loaded yet
        head = os.pread(fd, 24, 0)
    except (KeyError, ValueError, OverflowError, OSError):
        return True
    if head[:8] != b"ELASTICP" or len(head) != 24:
        return True
    owner = int.from_bytes(head[16:24], sys.byteorder)
    if owner in (0, os.getpid()):
        return False
    try:
        os.kill(owner, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _install() -> None:
    """Load the hook from the `elastic` that this file belongs to, wherever that is."""
    here = os.path.dirname(os.path.abspath(__file__))
    agent = os.path.dirname(here)
    folder = os.path.dirname(agent)
    # In a checkout `elastic/agent` is a link, and its target's parent has `elastic` in it.
    root = os.path.dirname(folder) if os.path.basename(folder) == "elastic" else folder
    sys.path.insert(0, root)
    try:
        from elastic.agent import hook
    finally:
        sys.path.remove(root)
    hook.install()


def _give_way() -> None:
    """Run the sitecustomize behind this one; its exceptions go where they would have gone."""
    this = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401 - another one, or none
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    if this is not None:  # importlib looks for what it has just loaded
        sys.modules.setdefault("sitecustomize", this)


_here = os.path.dirname(__file__)
sys.path[:] = [entry for entry in sys.path if entry != _here]
if not _owned_by_another():
    try:
        _install()
    except Exception as error:  # noqa: BLE001 - the user's process matters more than ours
        sys.stderr.write(f"elastic: progress of this process is not followed: {error!r}\n")
_give_way()
