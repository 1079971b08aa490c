"""Every environment name that passes between our processes, and the one reader of the environment."""

import os
from collections.abc import MutableMapping

# --- agent to the processes that it starts (agent/starter.py, agent/hook.py, elastic/session.py) ---

PAGE_FD = "ELASTIC_PAGE_FD"
"""Number of the inherited descriptor of this rank's progress page (`proto/page.py`)."""

LINK_FD = "ELASTIC_LINK_FD"
"""Number of the inherited descriptor of this rank's link to its agent (`proto/link.py`)."""

MARK = "ELASTIC_MARK"
"""`<job>/<node>/<round>`, on everything that an agent starts: what is left of a job can be found."""

ROUND = "ELASTIC_ROUND"
"""Number of the round that a rank belongs to."""


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
