"""Which process a pid means that somebody wrote down: the number may be another's by now, and in containers, where
numbers are low, it mostly is.
"""

from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def began(pid: int) -> str:
    """When the process of that number began: this boot's id and the clock ticks since. No other process of that number
    has the same, here or on another machine. Empty: there is none.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return f"{_boot()} {stat.rpartition(')')[2].split()[19]}"


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:  # a sandbox that hides it
        return ""
