"""What a starter is asked to start, and how every starter turns it into a command line."""

import json
import resource
from dataclasses import asdict, dataclass, fields
from typing import Any

KINDS = ("script", "module", "program", "run_path", "store", "spare")

OBEYED_AT_START = ("PYTHON", "LD_", "GLIBC_TUNABLES", "MALLOC_")
"""Variables, by their beginning, that count when a process starts: a standby must have been started
with those of the ranks, whatever a script changes them to later."""

RUN_PATH = (
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""What torchrun's --run-path does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSpec:
    """One process to start. Construction raises ValueError where a field makes no sense."""

    kind: str
    """script, module (python -m), program (anything executable), run_path, store or spare."""
    target: str
    """Path of the script, name of the module, or the program; for a store the host of its address,
    for a spare its device."""
    args: tuple[str, ...] = ()
    """Of the script; for a spare what it is to rehearse, as `ModulesNote` has it."""
    environ: dict[str, str]
    """The complete environment; the descriptors' names are added by the starter."""
    cwd: str
    title: str = ""
    """Command line that `ps` shows for a forked process; empty: what a spawned one would show."""
    python: str
    """Path of the interpreter."""
    threads: int | None = None
    """Intra-op threads of a forked rank; None: what OMP_NUM_THREADS or torch itself says."""
    cpus: tuple[int, ...] | None = None
    """CPUs that it may run on; None: as the agent."""
    open_files: int | None = None
    """Descriptors that it may have (-1: any number); None: as many as the agent."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        if not (self.target or self.kind == "store") or not self.cwd or not self.python:
            raise ValueError("target, cwd and python must not be empty")
        texts = [self.target, *self.args, self.cwd, self.title, self.python]
        texts += [*self.environ, *self.environ.values()]
        if not all(isinstance(text, str) and "\0" not in text for text in texts):
            raise ValueError("every text of a spec is a string without a zero byte")
        if any(not name or "=" in name for name in self.environ):
            raise ValueError("a name in the environment is empty or holds '='")
        if self.threads is not None and self.threads < 1:
            raise ValueError("threads is 1 or more")
        if self.cpus is not None and (not self.cpus or min(self.cpus) < 0):
            raise ValueError("cpus names at least one CPU, by numbers of 0 or more")
        if self.open_files is not None and self.open_files < resource.RLIM_INFINITY:
            raise ValueError("open_files is 0 or more, or -1")

    def to_json(self) -> bytes:
        """Checked again by `from_json`; keeps bytes that are no UTF-8 (surrogates)."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "StartSpec":
        """Raises ValueError."""
        try:
            loaded: dict[str, Any] = json.loads(data)
            known = {field.name for field in fields(cls)}
            values = {name: value for name, value in loaded.items() if name in known}
            values["args"] = tuple(values.get("args", ()))
            if values.get("cpus") is not None:
                values["cpus"] = tuple(int(cpu) for cpu in values["cpus"])
            return cls(**values)
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"malformed start spec: {error}") from error

    def command(self) -> list[str]:
        """The command line of a spawned process; a store's is made by `agent/starters/spawner.py`."""
        match self.kind:
            case "program":
                return [self.target, *self.args]
            case "module":
                return [self.python, "-u", "-m", self.target, *self.args]
            case "run_path":
                return [self.python, "-u", "-c", RUN_PATH, self.target, *self.args]
        return [self.python, "-u", self.target, *self.args]
