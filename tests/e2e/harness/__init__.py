"""Real launchers, real faults: what the tests of this folder stand on."""

from . import processes
from .job import DEADLINE, ROOT, SCRIPT, Job, Node

__all__ = ["DEADLINE", "ROOT", "SCRIPT", "Job", "Node", "processes"]
