"""A job as its launcher sees it: the master's shell, and what agents have said that is in no journal."""

from elastic.master.launcher import Saved
from elastic.master.shell import Shell
from elastic.master.state import Job
from elastic.master.streams import Streams


class Served:
    """A `launcher.Master`."""

    def __init__(self, shell: Shell, streams: Streams) -> None:
        self._shell, self._streams = shell, streams
        self.fold, self.changed, self.now = shell.fold, shell.changed, shell.now

    @property
    def job(self) -> Job:
        return self._shell.job

    @property
    def saved(self) -> Saved:
        return self._streams.snapshots.saved

    @property
    def metrics(self) -> str:
        return self._streams.metrics
