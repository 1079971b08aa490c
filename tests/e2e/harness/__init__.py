"""Real launchers, real faults: what the tests of this folder stand on."""

from . import processes
from .job import SCRIPT, Job, Node

__all__ = ["SCRIPT", "Job", "Node", "processes"]
