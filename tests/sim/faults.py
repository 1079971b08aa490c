"""What goes wrong in a simulated job, as a sentence."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fault:
    at: float
    kind: str
    node: str = ""
    seconds: float = 0.0
    detail: str = ""

    def __repr__(self) -> str:
        about = [f"at={self.at:g}"] + [f"node={self.node!r}"] * bool(self.node)
        about += [f"seconds={self.seconds:g}"] * bool(self.seconds)
        about += [f"error={self.detail!r}"] * bool(self.detail)
        return f".{self.kind}({', '.join(about)})"


@dataclass(frozen=True)
class Faults:
    """`Faults().kill_rank(at=3, node="b").lose_node(at=9, node="c")`; times in job seconds."""

    all: tuple[Fault, ...] = ()

    def __repr__(self) -> str:
        return "Faults()" + "".join(map(repr, self.all))

    def and_(self, fault: Fault) -> "Faults":
        return replace(self, all=(*self.all, fault))

    def kill_rank(self, *, at: float, node: str) -> "Faults":
        """SIGKILL to one of its ranks."""
        return self.and_(Fault(at, "kill_rank", node))

    def script_error(self, *, at: float, node: str, error: str = "ValueError") -> "Faults":
        """One of its ranks raises."""
        return self.and_(Fault(at, "script_error", node, detail=error))

    def kill_agent(self, *, at: float, node: str) -> "Faults":
        """The agent dies with its ranks and its store; the guardian starts it again."""
        return self.and_(Fault(at, "kill_agent", node))

    def kill_store(self, *, at: float, node: str) -> "Faults":
        """The store of the round, if it is there."""
        return self.and_(Fault(at, "kill_store", node))

    def lose_node(self, *, at: float, node: str) -> "Faults":
        """The host is gone without a word."""
        return self.and_(Fault(at, "lose_node", node))

    def kill_launcher(self, *, at: float, node: str) -> "Faults":
        """Guardian, agent and ranks die; the host refuses connections."""
        return self.and_(Fault(at, "kill_launcher", node))

    def leave(self, *, at: float, node: str, seconds: float = 0.0) -> "Faults":
        """SIGTERM to the launcher: a preemption. Its ranks take so long to end."""
        return self.and_(Fault(at, "leave", node, seconds))

    def partition(self, *, at: float, node: str, seconds: float) -> "Faults":
        """Nothing passes between agent and master; ranks reach one another."""
        return self.and_(Fault(at, "partition", node, seconds))

    def restart_master(self, *, at: float, seconds: float = 1.0) -> "Faults":
        """The master is killed, and is back after a while."""
        return self.and_(Fault(at, "restart_master", "", seconds))

    def add_node(self, *, at: float, node: str) -> "Faults":
        return self.and_(Fault(at, "add_node", node))

    def drain(self, *, at: float, node: str) -> "Faults":
        return self.and_(Fault(at, "drain", node))

    def drain_job(self, *, at: float) -> "Faults":
        return self.and_(Fault(at, "drain_job"))

    def restart_job(self, *, at: float) -> "Faults":
        """By hand."""
        return self.and_(Fault(at, "restart_job"))
