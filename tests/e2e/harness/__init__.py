"""Real launchers, real faults: what the tests of this folder stand on."""

from . import processes
from .job import DEADLINE, FORK, ROOT, SCRIPT, Job, Node

__all__ = ["DEADLINE", "FORK", "ROOT", "SCRIPT", "Job", "Node", "processes"]
