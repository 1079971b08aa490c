"""Every environment name that passes between our processes, and the one reader of the environment."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from elastic.proto.errors import UsageError

# --- agent to the processes that it starts (agent/starters/starter.py, agent/hook.py, elastic/session.py) ---

PAGE_FD = "ELASTIC_PAGE_FD"
"""Number of the inherited descriptor of this rank's progress page (`proto/page.py`)."""

LINK_FD = "ELASTIC_LINK_FD"
"""Number of the inherited descriptor of this rank's link to its agent (`proto/link.py`)."""

MARK = "ELASTIC_MARK"
"""`<job>/<node>/<round>`, on everything that an agent starts: what is left of a job can be found."""

JOB = "ELASTIC_JOB"
"""The job's own id, which no other job of its name has."""

LAUNCH = "ELASTIC_LAUNCH"
"""Of the job's command: another each time that it is given, and the job goes on."""

ROUND = "ELASTIC_ROUND"
"""Number of the round that a rank belongs to."""


# --- k8s/pods.py to elastic-run in a worker pod ---

POD_JOB = "ELASTIC_POD_JOB"
"""Name of the ElasticJob that this pod is a worker of: the run id."""

POD_NAME = "ELASTIC_POD_NAME"
"""The pod's own name: the node's id."""

POD_MASTER = "ELASTIC_POD_MASTER"
"""host:port of the Service of the job's master."""

POD_NODES = "ELASTIC_POD_NODES"
"""`min:max` of the spec, which decides over --nnodes."""


# --- k8s/pods.py to elastic.job_master in a master pod ---

MASTER_JOB = "ELASTIC_MASTER_JOB"
"""namespace/name of the ElasticJob that it serves."""

MASTER_POD = "ELASTIC_MASTER_POD"
"""The pod's own name, which `status.accepted` names where this master is meant."""

MASTER_ADDRESS = "ELASTIC_MASTER_ADDRESS"
"""host:port, as agents dial it."""

MASTER_IP = "ELASTIC_MASTER_IP"
"""The pod's own address, on which it listens."""

MASTER_FOLDER = "ELASTIC_MASTER_FOLDER"
"""Where the journal is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A worker pod of an ElasticJob, seen from inside."""

    job: str
    name: str
    master: str
    """host:port."""
    nodes: str
    """`min:max`."""


def pod(environ: Mapping[str, str]) -> Pod | None:
    """What `environ` says of the pod that this process is in; None: it is in none of ours.

    Raises UsageError.
    """
    if not environ.get(POD_JOB):
        return None
    missing = [name for name in (POD_NAME, POD_MASTER, POD_NODES) if not environ.get(name)]
    if missing:
        raise UsageError(
            f"{POD_JOB} is set, but {', '.join(missing)} not: leave ELASTIC_POD_* to the operator"
        )
    return Pod(
        job=environ[POD_JOB],
        name=environ[POD_NAME],
        master=environ[POD_MASTER],
        nodes=environ[POD_NODES],
    )


OF_TORCHRUN = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
        "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
    }
)  # fmt: skip
"""What a rank is told by torchrun, and by us: of one rank in one round, and never in a standby."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What torchrun, or whoever started this process, says of its rank; one of its own by default."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    """Host of rank 0."""
    master_port: str = ""


def launch() -> Launch:
    """Raises UsageError."""
    if "RANK" not in os.environ and _number("WORLD_SIZE", 1) > 1:
        raise UsageError("WORLD_SIZE is set, but RANK is not: start the script with torchrun")
    local = "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ
    return Launch(
        rank=_number("RANK", 0),
        world_size=_number("WORLD_SIZE", 1),
        local_rank=_number("LOCAL_RANK", 0) if local else 0,
        local_world_size=_number("LOCAL_WORLD_SIZE", 1) if local else 1,
        master_addr=os.environ.get("MASTER_ADDR", ""),
        master_port=os.environ.get("MASTER_PORT", ""),
    )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name} is a number, not {text!r}")
    return int(text or default)


def process_environment() -> MutableMapping[str, str]:
    """This process's environment itself, not a copy: a change to it is a change to the process."""
    return os.environ


def configure_grpc() -> None:
    """For this process alone, before it imports grpc; what a user has set stays.

    Names are found as everybody here finds them: its own resolver asks name servers for what a file
    has, and waits for those that do not answer. What it would print, we say in a sentence.
    """
    os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
