"""What failures are called, and what texts say of them. Pure.

The patterns are of error kinds, as the kernel, drivers and libraries word them.
A rule is a label and a pattern; of a table, the first that matches holds. Texts come from
`gist`: without source lines of tracebacks, exception names without their modules.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from elastic.proto import xids

ACTIONS: Mapping[str, str] = {
    "script_error": "correct the script",
    "import_error": "install the package, or correct the import",
    "library_mismatch": "install a build that fits driver, CUDA, NCCL and C library",
    "config_error": "correct arguments, variables or the configuration file",
    "collective_mismatch": "correct the script: ranks call collectives that do not fit",
    "device_oom": "make the model or the batch smaller, or shard it further",
    "device_assert": "correct the script: an index is out of range on the device",
    "device_illegal_access": "correct or replace a kernel; the device is sound",
    "device_error": "probe the device: a call failed and nothing says why",
    "no_device": "start driver or fabric manager, free the device, or take the node out",
    "ecc_error": "drain the node and reset the device; replace it if it comes again",
    "gpu_lost": "take the node out; it needs a power cycle",
    "nvlink_error": "take the node out and look at links and switches",
    "gpu_firmware": "reset the device; look at driver and firmware",
    "host_hardware": "take the node out and replace memory or processor",
    "host_oom": "find what else uses the host's memory, or use less",
    "cgroup_oom": "raise the container's memory limit, or use less",
    "memory_refused": "use less memory, or raise the process's own limit",
    "shared_memory_full": "give the container more of /dev/shm, or use fewer loader workers",
    "crash": "look at the native code: the process brought a signal on itself",
    "peer_hung": "look at what held that rank up; if it was at work, and not training, have the script say so "
    "(elastic.session.in_phase); ranks that wait apart have to call the same collectives in the same order",
    "network": "look at addresses, links and firewalls between nodes",
    "node_lost": "replace the node: nothing comes from it",
    "store_lost": "restart: the process that ranks meet at has died",
    "port_in_use": "choose another port, or end who holds it",
    "start_failed": "look at the command and the working directory on that node",
    "disk_full": "free space or inodes",
    "storage_error": "look at the disk or the mount",
    "permission_denied": "grant the right, or write elsewhere",
    "file_missing": "correct the path, or mount it",
    "limit_reached": "raise the limit: files, processes, CPU time, file size",
    "data_error": "repair or skip the damaged input",
    "dataloader_worker_died": "look at the loader's worker, which was ended by a signal or left",
    "checkpoint_damaged": "load an older checkpoint",
    "checkpoint_mismatch": "load with the model that wrote it",
    "loss_not_finite": "go back some steps, skip the batch, or lower the rate",
    "timeout": "look at what takes so long: the script's own limit ran out",
    "killed": "ask who sent the signal",
    "interrupted": "nothing: a person did it",
    "preempted": "nothing: the scheduler wants the node, and gives one back",
}
"""What an operator does about it, by label; two that call for the same would be one."""


class Rule(NamedTuple):
    label: str
    pattern: re.Pattern[str]


class Found(NamedTuple):
    label: str
    line: str
    """The line that says so."""


def _any(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.IGNORECASE | re.MULTILINE)


def _rules(*rows: tuple[str, ...]) -> tuple[Rule, ...]:
    """Of rows of a label and the alternatives of its pattern."""
    return tuple(Rule(label, _any(*alternatives)) for label, *alternatives in rows)


DEVICE = _rules(
    ("gpu_lost", r"fallen off the bus|GPU is lost|unable to determine the device handle"),
    (
        "ecc_error",
        r"\bECC error(?!s?\s*[:=]\s*0\b)|double.bit error|row remap\w*:? .*fail|ECC uncorrect",
    ),
    ("nvlink_error", r"NVLink error(?!s?\s*[:=]\s*0\b)|NVSwitch.*(?:fatal|error)|\bSXid\b"),
    ("gpu_firmware", r"RPC from GSP|GSP (?:kernel exception|task|firmware)|gpu reset required"),
    ("device_assert", r"device-side assert(?!ion)|assertion `[^\n]*` failed|: block: \["),
    (
        "device_illegal_access",
        r"illegal memory access|misaligned address|illegal instruction was encountered",
        r"invalid program counter|invalid address space|hardware stack error",
        r"cudaErrorIllegal|cudaErrorMisaligned|CUDA_ERROR_ILLEGAL",
    ),
    (
        "device_oom",
        r"(?:CUDA|HIP|XPU|MPS|NPU)(?: error)?: out of memory|\b(?:CUDA|HIP|XPU|MPS|NPU) (?:backend )?out of memory",
        r"failed to CUDA \w*alloc|(?:CUBLAS|CUDNN|CUSPARSE|CUFFT)_(?:STATUS_)?ALLOC_FAILED",
        r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|^OutOfMemoryError\b",
        r"cuda failure (?:2 )?'?out of memory|runtime error \(2\) *: *out of memory",
    ),
    (
        "library_mismatch",
        r"driver version is insufficient|driver on your system is too old|no kernel image is",
        r"update your (?:GPU )?driver|driver/library version mismatch|unsatisfied condition",
        r"unsupported (?:display driver|toolchain|PTX)|compiled with an unsupported",
        r"system driver mismatch|forward compatibility was attempted|invalid device function",
        r"not compiled with (?:CUDA|NCCL|MPI)|doesn't have (?:NCCL|MPI|GLOO|UCC|XCCL) built",
        r"Mismatched NCCL version|NCCL version mismatch|is not compatible with the current PyTorch",
    ),
    (
        "no_device",
        r"no CUDA GPUs are|no CUDA.capable device|busy or unavailable|system not yet initialized",
        r"found no NVIDIA driver|invalid device ordinal|might not have a CUDA|nvml error",
        r"could not select device driver|no (?:devices|GPUs) were found|CUDA unknown error",
        r"nvidia-container-cli|RmInitAdapter failed|libcuda\.so[.\d]*: cannot open",
        r"CUDA is not available(?!\. *Disabl|[,;:. ]+(?:us|fall|default|switch|run))|torch\.cuda\.is_available\(\) is False",
        r"(?:driver|fabric manager) (?:is )?not (?:loaded|running)|incorrectly set up environment",
    ),
    (
        "device_error",
        r"unspecified launch failure|CU(?:DNN|BLAS|SPARSE|FFT|RAND|SOLVER)_STATUS_[A-Z_]+",
        r"(?-i:CU(?:FFT|RAND)_(?!STATUS)[A-Z_]+)",
        r"launch timed out|cuda runtime error \(|ncclUnhandledCudaError|unhandled cuda error",
        r"\b(?:CUDA|HIP)(?: driver)? error\b|CUDA failure|cudaError[A-Z]\w+|CUDA_ERROR_[A-Z]",
    ),
)
"""Of devices and their drivers: as good in a log line as in an exception."""

SHARED_MEMORY = _rules(
    (
        "shared_memory_full",
        r"shared memory ?\(shm\)|out of shared memory|shared memory segment",
        r"insufficient shared memory|/dev/shm.*(?:No space|full)|No space.*/dev/shm",
        r"shm_open|extend /dev/shm",
    ),
)

MISMATCH = _rules(
    (
        "collective_mismatch",
        r"mismatch between collectives|collective mismatch|mismatched collective",
        r"op\.preamble\.length|data size doesn't match expected size",
        r"expects same model across all ranks|not to match (?:sizes|strides) of the same param",
        r"NCCL error[^\n]*invalid (?:usage|argument)|ncclInvalid(?:Usage|Argument)",
    ),
)

PEER_TIMED_OUT = _any(
    r"watchdog caught collective|collective operation timeout|timed out waiting \d+ ?ms for",
    r"monitoredBarrier|store.based barrier|\bWork\w*\([^)]*\)? timed out",
    r"caught collective operation",
)
"""A peer did not come to what all do together."""

PEER_CLOSED = _any(
    r"connection (?:was )?(?:closed|reset|aborted|refused)|closed by (?:remote )?peer|broken pipe",
    r"remote process exited|ncclRemoteError|ncclSystemError|unhandled system error",
    r"communicator was aborted|application timeout caused pair closure|socket timeout",
    r"connectFullMesh failed|store->get|failed to (?:recv|send), got|waiting for clients",
    r"^(?:ConnectionError|ConnectionResetError|ConnectionAbortedError|BrokenPipeError)\b",
    r"^Dist(?:Network|Backend|Store)Error\b|ncclInProgress|heartbeat monitor",
)
"""A peer, or the way to it, is gone."""

NETWORK = _rules(
    (
        "network",
        r"no route to host|network is (?:unreachable|down)|host is unreachable",
        r"name or service not known|name resolution|nodename nor servname|getaddrinfo|gaierror",
        r"cannot be resolved|failed to resolve|NET/IB ?:[^\n]*(?:completion|async event|error|fail)",
        r"ibv_\w+ failed|transport retry|port error|client socket has (?:timed out|failed)",
        r"cannot assign requested address|unable to find (?:address|interface)",
        r"no (?:socket )?interface found|max retries exceeded|\bURLError\b",
        r"(?:connect\w*|read|connection) timed out|couldn't connect to|bootstrap\w*[^\n]*fail",
    ),
)

_QUANTITY = r"(?:loss|grad\w*|norm|probabilit\w+|tensor|values?|logits|weights?|activation\w*)"

CAUSES = (
    *_rules(
        (
            "preempted",
            r"preempt(?!ive cleanup)|spot (?:instance|interruption|termination)|maintenance event",
            r"interruption notice|being (?:evicted|reclaimed)",
        ),
        ("cgroup_oom", r"oom-kill event|cgroup out-of-memory handler|OOMKilled"),
        ("interrupted", r"^KeyboardInterrupt\b"),
        ("config_error", r"duplicate GPU detected"),
    ),
    *DEVICE,
    *SHARED_MEMORY,
    *MISMATCH,
    *_rules(
        ("port_in_use", r"EADDRINUSE|address (?:is )?already in use"),
        (
            "library_mismatch",
            r"undefined symbol|symbol lookup error|GLIBC\w*_[\d.]+'? not found",
            r"binary incompatib|against (?:ABI|API) version|compiled using NumPy",
            r"compiled with different CUDA|lib[\w.+-]+\.so[.\d]*: cannot open shared object",
            r"operator \w+::\w+ does not exist|wrong ELF class|invalid ELF header",
            r"No module named '?[\w.]*_(?:cuda|C|ext)'?$",
        ),
        ("dataloader_worker_died", r"DataLoader worker .*(?:exited unexpectedly|killed by signal)"),
        ("timeout", r"DataLoader timed out|^TimeoutExpired\b|its timer .* expired"),
        (
            "checkpoint_mismatch",
            r"loading state_dict|in state_dict|missing key in checkpoint|size mismatch for",
            r"loaded state dict|parameter group that doesn't match",
            r"size mismatch between saved|different number of parameter groups",
        ),
        (
            "disk_full",
            r"no space left on device|disk quota exceeded|\bENOSPC\b|\bEDQUOT\b",
            r"unexpected pos \d+ vs|\d+ requested and \d+ written|PytorchStreamWriter failed",
            r"database or disk is full",
        ),
        (
            "checkpoint_damaged",
            r"PytorchStreamReader failed|archive is corrupted|central directory",
            r"deserializing header|HeaderTooSmall|MetadataIncompleteBuffer|weights only load failed",
            r"^UnpicklingError\b|invalid magic number|unexpected EOF, expected",
            r"storage has wrong byte size|checksum .*(?:mismatch|differ|wrong)|ran out of input",
            r"unexpected pos|InvalidHeader|corrupt\w* (?:checkpoint|file)",
        ),
        (
            "memory_refused",
            r"^\w*MemoryError\b|cannot allocate memory|can't allocate memory|std::bad_alloc",
            r"not enough memory|unable to allocate|\bENOMEM\b",
        ),
        (
            "limit_reached",
            r"too many open files|\bEMFILE\b|can't start new thread|^BlockingIOError\b.*Errno 11",
            r"fork: (?:retry: )?resource temporarily|file too large|too many links",
            r"received \d+ items of ancdata|pthread_create failed|no file descriptors",
            r"no locks available|inotify.*limit",
        ),
        (
            "storage_error",
            r"input/output error|remote I/O error|read-only file system|stale (?:NFS )?file handle",
            r"transport endpoint is not connected|transport endpoint shutdown",
            r"structure needs cleaning|host is down|Errno 74\b|no such device\b",
            r"\[Errno 110\][^\n]*'/",
        ),
        (
            "loss_not_finite",
            rf"\b{_QUANTITY}\b[^\n]{{0,80}}\b(?:nans?|infs?|infinit\w+|non-?finite|not finite)\b",
            rf"\b(?:nan|inf|infinite|non-?finite)\b[^\n]{{0,80}}\b{_QUANTITY}\b",
            r"^FloatingPointError\b|minimum (?:loss )?scale|loss scale[^\n]*minimum",
            r"(?:float|convert) (?:nan|infinity)",
        ),
        (
            "config_error",
            r"environment variable|env://",
            r"unknown backend|invalid backend|^usage: |unrecognized arguments|invalid choice",
            r"^(?:\w*YAMLError|ScannerError|ParserError: while|TOMLDecodeError|Missing\w*Header)\b",
            r"^(?:NoSectionError|NoOptionError|DuplicateOptionError|ParsingError)\b",
            r"^(?:Config|Interpolation|Override|MissingMandatory)\w*:",
            r"(?:config|settings)[\w./-]*\.(?:json|ya?ml|toml|ini)",
            r"no such option|missing option|invalid value for",
        ),
        (
            "data_error",
            r"image file is truncated|cannot identify image|broken (?:PNG|data stream)",
            r"^(?:UnidentifiedImageError|JSONDecodeError|UnicodeDecodeError|BadZipFile|BadGzipFile",
            r"ReadError|LZMAError|IncompleteRead|ParseError|ParserError|ArrowInvalid|Bad\w*File",
            r"DecompressionBombError|DecodeError|DecodingError|DatasetGenerationError)\b",
            r"^error: (?:Error -\d|unpack|unpack_from|incorrect)|not a (?:gzip|zip|bzip2|parquet)",
            r"end-of-stream marker|compressed (?:data|file) ended|CRC check failed|bad CRC",
            r"incorrect (?:header|data|length) check|unpack\w* requires a buffer",
            r"greater than file size|failed to read all data for array|no data left in file",
            r"magic (?:number|bytes|string)|allow_pickle|line contains NU|invalid start byte",
            r"codec can't decode|truncated|corrupt|not fully written|tokenizing data",
            r"invalid (?:header|bitcode|block|stored block|distance)|buffer size must be a multiple",
            r"cannot mmap an empty file|expecting (?:value|property name)|unterminated string",
        ),
        ("permission_denied", r"^PermissionError\b|permission denied|operation not permitted"),
        ("permission_denied", r"access ?denied|\b403\b[^\n]*forbidden|gated repo"),
        (
            "file_missing",
            r"^(?:FileNotFoundError|NotADirectoryError)\b|no such file or directory",
            r"there is no \S+ on this node|does not exist|NoSuchKey",
            r"does not appear to have a file|unable to open file|can't open file",
        ),
        ("import_error", r"^(?:ModuleNotFoundError|ImportError)\b|no module named"),
        ("timeout", r"^(?:asyncio\.)?TimeoutError\b|wait timeout after|timed out"),
    ),
)
"""What ends a process by itself, most telling first."""

KERNEL_OOM = _rules(
    ("cgroup_oom", r"memory cgroup out of memory|CONSTRAINT_MEMCG|mem_cgroup_out_of_memory"),
    ("host_oom", r"out of memory: kill|global_oom|CONSTRAINT_NONE|oom_reaper: reaped"),
)
KERNEL_HARDWARE = _rules(
    ("gpu_lost", r"NVRM:[^\0]*fallen off the bus|GPU is lost"),
    ("host_hardware", r"EDAC [^\n]*\bUE\b|uncorrect\w* .*memory error|Memory failure: 0x"),
    ("host_hardware", r"Hardware Error\]:.*(?:uncorrect|fatal)|hardware memory corruption"),
    ("nvlink_error", r"\bSXid\b"),
)
KERNEL_MACHINE = _rules(("host_hardware", r"\bMCE\b|\[Hardware Error\]|machine check"))
"""Corrected errors too: they explain a crash, not an exception."""
KERNEL_STORAGE = _rules(
    (
        "storage_error",
        r"I/O error|remounting filesystem read-only|(?:EXT4|XFS|BTRFS)\S* .*(?:error|corrupt)",
        r"nfs: server \S+ not responding|LustreError|critical medium error|aborting journal",
    ),
)
KERNEL_NETWORK = _rules(
    ("network", r"\blink (?:is )?down\b|NETDEV WATCHDOG|tx timeout|port \d+ link down"),
)

XIDS = {
    **dict.fromkeys((48, 64, 94, 95, 140, 171, 172), "ecc_error"),
    **dict.fromkeys((74, 137, *range(144, 151), 155), "nvlink_error"),
    **dict.fromkeys((79,), "gpu_lost"),
    **dict.fromkeys((38, 61, 62, 119, 120, 122, 123), "gpu_firmware"),
    **dict.fromkeys((109, 110, 143), "device_error"),
}
"""Faults of the device itself, by NVIDIA's catalogue. 45 and 154 only follow others."""
XIDS_OF_PROGRAMS = {
    **dict.fromkeys((13, 31, 68, 69), "device_illegal_access"),
    **dict.fromkeys((8, 32, 43, 44), "device_error"),
    **dict.fromkeys((63, 92), "ecc_error"),
}
"""What a program or a corrected error brings too: they say something where nothing else does."""

_SOURCE_LINE = re.compile(r"^(?: {2,}(?!what\(\))|\[W\d)")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_MODULES = re.compile(r"^(?:[\w<>]+\.)+(?=[A-Za-z_]\w*(?::|$))", re.MULTILINE)
_RAISED = re.compile(
    r"^(?:\w*(?:Error|Exception|Interrupt|Expired|Exit|File)\b|\s*what\(\))", re.IGNORECASE
)


def gist(text: str) -> str:
    """Without a traceback's source lines, torch's warnings, rank prefixes and modules' names."""
    lines = _RANK_PREFIX.sub("", text).splitlines()
    return _MODULES.sub("", "\n".join(x for x in lines if not _SOURCE_LINE.match(x)))


def raised(text: str) -> str:
    """Of a gist, the lines that exceptions wrote: those of a chain, oldest first."""
    return "\n".join(line for line in text.splitlines() if _RAISED.match(line))


def first(rules: Iterable[Rule], text: str) -> Found | None:
    """The first rule that the text fits, and the line that does."""
    for label, pattern in rules:
        if match := pattern.search(text):
            return Found(label, line_at(text, match.start()))
    return None


def line_at(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : end if end >= 0 else len(text)].strip()[:300]


def first_line(rules: Sequence[Rule], lines: Iterable[str]) -> Found | None:
    """The first rule that any of the lines fits."""
    kept = tuple(lines)
    for rule in rules:
        for line in kept:
            if rule.pattern.search(line):
                return Found(rule.label, " ".join(line.split())[:300])
    return None


def first_xid(table: Mapping[int, str], lines: Iterable[str]) -> Found | None:
    """The first line of an Xid that is in a table."""
    for line in lines:
        if (xid := xids.find(line)) and (label := table.get(xid.number)):
            return Found(label, " ".join(line.split())[:300])
    return None
