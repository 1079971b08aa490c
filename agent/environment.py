"""The environment of a rank: torchrun's variables, and few of ours."""

from collections.abc import Mapping
from pathlib import Path

from elastic.agent.settings import AgentSettings
from elastic.proto import env
from elastic.proto import master_pb2 as pb

STARTUP = str(Path(__file__).parent / "startup")
"""Goes first on a rank's PYTHONPATH; see agent/startup/sitecustomize.py."""

RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RECORDED = 256
"""Collectives that torch's flight recorder keeps; Gloo's keeps none by itself."""
TIMING = "TORCH_NCCL_ENABLE_TIMING"
"""Without it the recorder does not know which collectives have begun on the device."""


def common_environment(settings: AgentSettings) -> dict[str, str]:
    """What is the same for every rank in every round."""
    base = dict(settings.workload.environ)
    own = {
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(settings.signals),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if not any(name in base for name in RECORDER_SIZES):
        own[RECORDER_SIZES[0]] = str(RECORDED)
    if TIMING not in base:
        own[TIMING] = "1"
    if settings.timer_pipe is not None:
        own["TORCHELASTIC_TIMER_FILE"] = settings.timer_pipe
    return base | resolver(base) | startup_path(base) | own


def rank_environment(
    settings: AgentSettings, job: str, order: pb.Directive, local_rank: int, error_file: str
) -> dict[str, str]:
    """What the rank with `local_rank` sees in the round of `order`. job: the job's own id."""
    host, _, port = order.store.rpartition(":")
    own = {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(order.first_rank + local_rank),
        "GROUP_RANK": str(order.node_rank),
        "ROLE_RANK": str(order.role_first_rank + local_rank),
        "ROLE_NAME": settings.role,
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "WORLD_SIZE": str(order.world_size),
        "GROUP_WORLD_SIZE": str(order.num_nodes),
        "ROLE_WORLD_SIZE": str(order.role_world_size),
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(order.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
        "TORCHELASTIC_RUN_ID": settings.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        env.MARK: mark(settings, order.round),
        env.JOB: job,
        env.LAUNCH: order.launch,
        env.ROUND: str(order.round),
    }
    if settings.virtual_local_rank:
        own |= {"LOCAL_RANK": "0"} | virtual_devices(settings.workload.environ, local_rank)
    return common_environment(settings) | own


def resolver(base: Mapping[str, str]) -> dict[str, str]:
    """Keep a silent DNS server from costing 5 s: torch's sockets ask it for names of addresses."""
    return {} if "RES_OPTIONS" in base else {"RES_OPTIONS": "timeout:1 attempts:1"}


def startup_path(base: Mapping[str, str]) -> dict[str, str]:
    path = base.get("PYTHONPATH")
    return {"PYTHONPATH": f"{STARTUP}:{path}" if path else STARTUP}


def mark(settings: AgentSettings, number: int) -> str:
    return f"{settings.run_id}/{settings.node_id}/{number}"


def virtual_devices(base: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """--virtual-local-rank: every rank sees one device, as number 0."""
    visible = base.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else []
    device = devices[local_rank] if local_rank < len(devices) else str(local_rank)
    return {"CUDA_VISIBLE_DEVICES": device}
