"""What is recorded: which fault, on which ranks, seen how."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One job that is run to fail. `record.py` runs it, `scripts/train.py` is what its ranks run."""

    fault: str
    """A function of scripts/faults_*.py."""
    label: str
    variant: int = 0
    nodes: tuple[int, ...] = (1,)
    """Ranks of each node."""
    on: int | None = 0
    """The rank that fails; None: no rank is the culprit."""
    step: int = 2
    """-1: before torch is imported."""
    linger: float = 0.0
    """Seconds that the failing rank takes to exit, its process group closed."""
    late: float = 0.0
    """Seconds by which what the culprit's node tells is late at the master."""
    after: float = 7.0
    """Seconds for which the rest is listened to, once the first failure was heard."""
    timeout: float = 30.0
    """Of the process group, in seconds."""
    flags: tuple[str, ...] = ()
    """More arguments of the script."""
    signal: int = 0
    """Sent from outside once the rank waits for it."""
    to_all: bool = False
    """The signal goes to every rank of the culprit's node."""
    kills_store: bool = False
    silent: bool = False
    """Nothing comes from the culprit's node: it is gone."""
    kind: str = "script"
    entry: str = "train.py"
    spawn: bool = False
    """The rank is spawned, not forked from a standby."""
    logs_full: bool = False
    timers: bool = False
    memory: int = 0
    """Bytes that the job may use, in a cgroup of its own; 0: no limit."""
    cut: bool = False
    """The network between the nodes is cut once all ranks train; each node has a namespace."""
    cwd_gone: bool = False
    bad_disk: bool = False
    """Reads of `disk/data` fail, and `readonly` takes no files."""
    environ: tuple[tuple[str, str], ...] = ()
    cuda: bool = False

    @property
    def id(self) -> str:
        shape = "x".join(map(str, self.nodes))
        parts = [self.label, self.fault or self.entry.rpartition("/")[2], str(self.variant)]
        parts += [f"n{shape}", f"r{self.on}" if self.on is not None else ""]
        parts += [f"s{self.signal}"] if self.signal else []
        parts += [name for name in ("linger", "late", "silent", "spawn") if getattr(self, name)]
        parts += ["debug"] if self.environ else []
        parts += ["cuda"] if self.cuda else []
        return "-".join(part.replace("_", "-") for part in parts if part)


def _alone(label: str, *faults: str | tuple[str, int], **more: object) -> list[Plan]:
    """One rank, no process group."""
    plans = []
    for one in faults:
        fault, variant = one if isinstance(one, tuple) else (one, 0)
        flags = ("--alone",)
        plans.append(Plan(fault=fault, variant=variant, label=label, flags=flags, **more))  # type: ignore[arg-type]
    return plans


_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((2,), 1),
    ((1, 1), 1),
    ((1, 1), 0),
    ((2, 2), 3),
    ((1, 1, 1), 2),
    ((2, 1), 0),
    ((2, 2), 0),
)


def _between(label: str, *faults: str | tuple[str, int], **more: object) -> list[Plan]:
    """Several ranks; by turns the culprit is heard first, closes its group first, or is late."""
    plans = []
    for number, one in enumerate(faults):
        fault, variant = one if isinstance(one, tuple) else (one, 0)
        nodes, on = _SHAPES[(number + len(fault)) % len(_SHAPES)]
        order: dict[str, float] = {}
        if number % 3 == 0:
            order["linger"] = 1.5
        elif number % 3 == 1 and len(nodes) > 1:
            order["late"] = 2.0
        plans.append(
            Plan(fault=fault, variant=variant, label=label, nodes=nodes, on=on, **(order | more))  # type: ignore[arg-type]
        )
    return plans


def _signals(label: str, *faults: str | tuple[str, int], **more: object) -> list[Plan]:
    """The same for what ends a process at once: it cannot linger."""
    plans = []
    for number, one in enumerate(faults):
        fault, variant = one if isinstance(one, tuple) else (one, 0)
        nodes, on = _SHAPES[1:6][(number + len(fault)) % 5]
        late = 0.0 if number % 3 == 2 else 2.0
        plans.append(
            Plan(fault=fault, variant=variant, label=label, nodes=nodes, on=on, late=late, **more)  # type: ignore[arg-type]
        )
    return plans


PLANS: list[Plan] = [
    # --- the script itself ---
    *_alone(
        "script_error", "value_error", "name_error", "zero_division", "recursion", "tensor_dtypes",
        "no_grad_needed", ("exit_code", 1), "exit_message", "hard_exit", "unpicklable",
        "lock_copied", "in_group", "chained", "broken_pipe", "in_thread_pool", "worker_process",
    ),
    *_between(
        "script_error", ("value_error", 1), "key_error", "type_error", "attribute_error",
        "index_error", "assertion", ("assertion", 1), "matmul_shapes", "backward_twice", "in_place",
        "exit_code", "logged_exit", "stop_iteration", "not_implemented", "own_error", "tool_failed",
    ),
    Plan(
        fault="wraps_the_peers_end", label="script_error", nodes=(1, 1, 1), on=1, linger=1.5,
    ),
    Plan(
        fault="wraps_the_peers_end", variant=1, label="script_error", nodes=(2, 1), on=2, late=2.0,
    ),
    Plan(fault="", label="script_error", entry="syntax.py", spawn=True),
    Plan(fault="", label="script_error", entry="indent.py"),
    # --- packages and libraries ---
    *_alone("import_error", "no_module", ("no_module", 2), "no_name", ("no_name", 1), step=-1),
    *_between("import_error", ("no_module", 1)),
    Plan(fault="", label="import_error", kind="module", entry="trainer_of_ours.pretrain"),
    *_alone(
        "library_mismatch", "no_library", ("no_library", 1), "undefined_symbol", "wrong_elf",
        "built_without_cuda", "newer_runtime", "no_nccl",
    ),
    *_between("library_mismatch", ("no_library", 2)),
    # --- settings ---
    *_alone(
        "config_error", "no_variable", "bad_yaml", "bad_json_config", "unknown_backend",
        "bad_device",
    ),
    *_between("config_error", ("no_variable", 1)),
    Plan(
        fault="value_error", label="config_error", nodes=(2,), on=None, flags=("--lr", "3e-4"),
    ),
    Plan(
        fault="key_error", label="config_error", on=None, flags=("--precision", "fp8"), spawn=True,
    ),
    # --- checkpoints and data ---
    *_alone(
        "checkpoint_damaged", "cut_checkpoint", ("cut_checkpoint", 1), "overwritten_checkpoint",
        "flipped_checkpoint", "bad_safetensors", ("bad_safetensors", 1),
    ),
    *_between("checkpoint_damaged", ("cut_checkpoint", 2), ("bad_safetensors", 2)),
    *_alone("checkpoint_mismatch", "other_model", "other_groups"),
    *_between("checkpoint_mismatch", ("other_model", 1)),
    *_alone(
        "data_error", "bad_json", "not_utf8", "bad_zip", "zip_checksum", ("cut_gzip", 1),
        "bad_image", "short_memmap",
    ),
    *_between(
        "data_error", "cut_gzip", ("bad_image", 1), "short_record", "bad_npy", "bad_tar",
        "worker_corrupt", ("bad_json", 1),
    ),
    *_alone("dataloader_worker_died", "worker_killed", "worker_segfault"),
    *_between("dataloader_worker_died", ("worker_killed", 1), "worker_exits"),
    *_alone("timeout", "worker_hangs"),
    *_alone("script_error", "worker_bug"),
    *_alone("shared_memory_full", "shm_small"),
    *_between("shared_memory_full", ("shm_small", 1)),
    *_alone("loss_not_finite", "nan_loss", "nan_probabilities", "nan_clip"),
    *_between("loss_not_finite", "nan_anomaly", ("nan_loss", 1), "nan_distribution", ("nan_loss", 2)),
    # --- disks and files ---
    *_alone("disk_full", "disk_full", ("disk_full", 2), ("disk_full", 3), "no_inodes"),
    *_between("disk_full", ("disk_full", 1), ("disk_full", 4)),
    Plan(fault="fills_log", label="disk_full", logs_full=True, nodes=(1, 1), on=1),
    Plan(fault="fills_log", label="disk_full", logs_full=True, flags=("--alone",)),
    *_alone("permission_denied", "denied", "read_only", ("denied", 2)),
    *_between("permission_denied", ("denied", 1)),
    *_alone("file_missing", "missing", "missing_folder", "missing_program", "missing_shard"),
    *_between("file_missing", ("missing", 1), ("missing", 2)),
    Plan(fault="", label="file_missing", entry="pretrain.py", nodes=(2,), on=0, spawn=True),
    # --- limits and memory ---
    *_alone(
        "limit_reached", "too_many_files", "file_too_large", "too_many_processes",
        ("too_many_processes", 1), "cpu_time",
    ),
    *_between("limit_reached", ("too_many_files", 1)),
    *_alone(
        "memory_refused", "no_address_space", ("no_address_space", 1), ("no_address_space", 2),
        ("no_address_space", 3), "cannot_allocate",
    ),
    *_alone("cgroup_oom", "eats_memory", memory=1200 << 20),
    *_alone("cgroup_oom", "child_eats_memory", memory=1200 << 20),
    Plan(fault="eats_memory", label="cgroup_oom", nodes=(2,), on=1, memory=1500 << 20),
    Plan(fault="eats_memory", label="cgroup_oom", nodes=(1, 1), on=1, late=2.0, memory=1500 << 20),
    Plan(fault="eats_memory", label="cgroup_oom", nodes=(2, 2), on=2, late=2.0, memory=2000 << 20),
    # --- crashes ---
    *_alone(
        "crash", ("segfault", 1), "segfault_in_thread", "aborts", "bad_free", ("bad_free", 1),
        "divides", "illegal_instruction", "trap", "cut_mapping", "stack_overflow", "terminate",
        "fatal_python",
    ),
    *_signals(
        "crash", "segfault", ("segfault", 2), ("aborts", 1), "heap_overrun", "terminate",
        ("cut_mapping", 1), "divides", "segfault_in_thread",
    ),
    # --- from outside ---
    *_signals("killed", "waits", signal=9),
    Plan(fault="waits", label="killed", signal=9, flags=("--alone",)),
    Plan(fault="waits", label="killed", signal=9, nodes=(2, 2), on=1),
    Plan(fault="waits", label="killed", signal=9, nodes=(1, 1, 1), on=1, late=2.0),
    Plan(fault="waits", label="killed", signal=15, nodes=(1, 1), on=0, late=2.0),
    Plan(fault="waits", label="killed", signal=15, nodes=(2,), on=1),
    Plan(fault="waits", label="killed", signal=1, flags=("--alone",), variant=1),
    Plan(fault="waits", label="interrupted", signal=2, flags=("--alone",)),
    Plan(fault="waits", label="interrupted", signal=2, nodes=(1, 1), on=1, late=2.0),
    # --- between ranks ---
    *_between(
        "collective_mismatch", "other_shape", ("other_shape", 1), "other_type", "other_call",
        timeout=4.0,
    ),
    *_between(
        "collective_mismatch", "other_shape", "other_type", "other_call", "skips_one", timeout=4.0,
        spawn=True, environ=(("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),),
    ),
    Plan(fault="skips_one", label="collective_mismatch", nodes=(1, 1, 1), on=2, timeout=3.0),
    Plan(fault="hangs", label="peer_hung", nodes=(1, 1), on=1, timeout=3.0),
    Plan(fault="hangs", variant=1, label="peer_hung", nodes=(2, 2), on=2, timeout=3.0),
    Plan(fault="hangs", variant=2, label="peer_hung", nodes=(1, 1, 1), on=0, timeout=3.0),
    Plan(fault="hangs", variant=2, label="peer_hung", nodes=(2,), on=1, timeout=3.0),
    Plan(fault="misses_barrier", label="peer_hung", nodes=(1, 1), on=1),
    Plan(fault="misses_barrier", variant=1, label="peer_hung", nodes=(2, 1), on=1),
    Plan(fault="waits", label="node_lost", nodes=(1, 1), on=1, signal=9, silent=True),
    Plan(fault="waits", label="node_lost", nodes=(2, 2), on=2, signal=9, silent=True, to_all=True),
    Plan(fault="waits", label="node_lost", nodes=(1, 1, 1), on=0, signal=9, silent=True),
    Plan(
        fault="asks_store", label="store_lost", nodes=(1, 1), on=None, kills_store=True,
    ),
    Plan(
        fault="asks_store", variant=1, label="store_lost", nodes=(2, 2), on=None, kills_store=True,
        late=2.0,
    ),
    Plan(fault="asks_store", label="store_lost", nodes=(2,), on=None, kills_store=True),
    *_alone("port_in_use", "port_taken", ("port_taken", 2)),
    *_between("port_in_use", ("port_taken", 1), ("port_taken", 3)),
    *_alone(
        "network", "nobody_listens", ("nobody_listens", 1), ("nobody_listens", 2), "unknown_host",
        ("unknown_host", 1), "unreachable", ("unreachable", 1), "reset", on=None,
    ),
    Plan(fault="trains_on", label="network", nodes=(1, 1), on=None, cut=True, timeout=4.0),
    Plan(fault="trains_on", label="network", nodes=(2, 2), on=None, cut=True, timeout=4.0),
    # --- time ---
    *_alone("timeout", "alarm", "alarm_handler", "tool_timeout", "queue_timeout"),
    *_between("timeout", "asyncio_timeout", "store_wait"),
    Plan(fault="torch_timer", label="timeout", timers=True, nodes=(1, 1), on=1, late=2.0),
    Plan(fault="torch_timer", label="timeout", timers=True, flags=("--alone",)),
    # --- ranks that never began ---
    Plan(fault="value_error", label="start_failed", cwd_gone=True, nodes=(1, 1), on=0),
    Plan(fault="value_error", label="start_failed", kind="program", entry="./launch.sh"),
    Plan(fault="", label="start_failed", kind="program", entry="./no-execute.sh"),
]  # fmt: skip
"""In the order in which they are run."""


def _on_devices(label: str, fault: str, variant: int = 0, **more: object) -> Plan:
    """Ranks with a GPU each, over NCCL."""
    wanted = {"nodes": (1, 1), "on": 1, "timeout": 10.0, **more}
    flags = ("--device=cuda", *(("--alone",) if wanted["nodes"] == (1,) else ()))
    return Plan(fault=fault, variant=variant, label=label, flags=flags, cuda=True, **wanted)  # type: ignore[arg-type]


DISK_PLANS: list[Plan] = [
    *_alone("storage_error", "bad_disk", ("bad_disk", 1), ("bad_disk", 3), bad_disk=True),
    Plan(fault="bad_disk", variant=2, label="storage_error", bad_disk=True, nodes=(2,), on=1),
    Plan(fault="bad_disk", variant=1, label="storage_error", bad_disk=True, nodes=(1, 1), on=1, late=2.0),
    Plan(fault="bad_disk", variant=3, label="storage_error", bad_disk=True, nodes=(2, 2), on=0, linger=2.0),
]  # fmt: skip
"""File systems that fail; kept in a folder of their own, as what follows, since the rules were there before."""
DEVICE_PLANS: list[Plan] = [
    _on_devices("device_oom", "out_of_memory", nodes=(1,), on=0),
    _on_devices("device_oom", "out_of_memory", 1, nodes=(2,)),
    _on_devices("device_oom", "out_of_memory", on=0, late=2.0),
    _on_devices("device_assert", "index_out_of_range", nodes=(1,), on=0),
    _on_devices("device_assert", "index_out_of_range", 1),
    _on_devices("device_assert", "index_out_of_range", nodes=(2,), on=0),
    _on_devices("device_illegal_access", "illegal_access", nodes=(1,), on=0),
    _on_devices("device_illegal_access", "illegal_access", nodes=(2,)),
    _on_devices("peer_hung", "hangs"),
    _on_devices("peer_hung", "hangs", 1, nodes=(2,), on=0),
    _on_devices("peer_hung", "hangs", 2, on=0),
    _on_devices("killed", "waits", signal=9, after=120.0),
    _on_devices("script_error", "value_error", after=120.0),
    _on_devices("script_error", "value_error", 1, nodes=(2,), on=0, after=120.0),
    _on_devices("node_lost", "waits", signal=9, silent=True),
]
"""What needs two GPUs."""
