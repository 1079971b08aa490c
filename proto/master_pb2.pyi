from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Version(_message.Message):
    __slots__ = ("major", "minor")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...

class FromAgent(_message.Message):
    __slots__ = ("hello", "heartbeat", "report", "spare_store", "unit", "leaving", "log", "snapshots", "stand", "found", "examined", "probed", "paired", "sync")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SPARE_STORE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    PAIRED_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    report: NodeReport
    spare_store: SpareStore
    unit: UnitDeclared
    leaving: Leaving
    log: LogChunk
    snapshots: Snapshots
    stand: Stand
    found: Found
    examined: Examined
    probed: Probed
    paired: Paired
    sync: Sync
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., report: _Optional[_Union[NodeReport, _Mapping]] = ..., spare_store: _Optional[_Union[SpareStore, _Mapping]] = ..., unit: _Optional[_Union[UnitDeclared, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., log: _Optional[_Union[LogChunk, _Mapping]] = ..., snapshots: _Optional[_Union[Snapshots, _Mapping]] = ..., stand: _Optional[_Union[Stand, _Mapping]] = ..., found: _Optional[_Union[Found, _Mapping]] = ..., examined: _Optional[_Union[Examined, _Mapping]] = ..., probed: _Optional[_Union[Probed, _Mapping]] = ..., paired: _Optional[_Union[Paired, _Mapping]] = ..., sync: _Optional[_Union[Sync, _Mapping]] = ...) -> None: ...

class ToAgent(_message.Message):
    __slots__ = ("welcome", "directive", "read_log", "snapshots", "leave", "look", "watch", "examine", "measure", "synced")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    READ_LOG_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    EXAMINE_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    directive: Directive
    read_log: ReadLogRequest
    snapshots: SnapshotOrders
    leave: Leave
    look: Look
    watch: Watch
    examine: Examine
    measure: Measure
    synced: Synced
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., directive: _Optional[_Union[Directive, _Mapping]] = ..., read_log: _Optional[_Union[ReadLogRequest, _Mapping]] = ..., snapshots: _Optional[_Union[SnapshotOrders, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., look: _Optional[_Union[Look, _Mapping]] = ..., watch: _Optional[_Union[Watch, _Mapping]] = ..., examine: _Optional[_Union[Examine, _Mapping]] = ..., measure: _Optional[_Union[Measure, _Mapping]] = ..., synced: _Optional[_Union[Synced, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "run_id", "job_uid", "epoch", "node_id", "incarnation", "slots", "host", "knock_address", "role", "labels", "node_rank", "report", "spare_store", "snapshots", "stands")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    KNOCK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SPARE_STORE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    version: Version
    run_id: str
    job_uid: str
    epoch: int
    node_id: str
    incarnation: int
    slots: int
    host: str
    knock_address: str
    role: str
    labels: _containers.ScalarMap[str, str]
    node_rank: int
    report: NodeReport
    spare_store: str
    snapshots: _containers.RepeatedCompositeFieldContainer[Snapshots]
    stands: _containers.RepeatedCompositeFieldContainer[Stand]
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., run_id: _Optional[str] = ..., job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., slots: _Optional[int] = ..., host: _Optional[str] = ..., knock_address: _Optional[str] = ..., role: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., node_rank: _Optional[int] = ..., report: _Optional[_Union[NodeReport, _Mapping]] = ..., spare_store: _Optional[str] = ..., snapshots: _Optional[_Iterable[_Union[Snapshots, _Mapping]]] = ..., stands: _Optional[_Iterable[_Union[Stand, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "job_uid", "epoch", "heartbeat_interval")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    version: Version
    job_uid: str
    epoch: int
    heartbeat_interval: float
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., heartbeat_interval: _Optional[float] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("kind", "epoch", "round", "node_rank", "num_nodes", "first_rank", "local_world_size", "world_size", "store", "role_first_rank", "role_world_size", "restart_count", "stop_grace", "exit_code", "reason", "prepare", "probe", "ending", "goes_on", "launch")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WAIT: _ClassVar[Directive.Kind]
        RUN: _ClassVar[Directive.Kind]
        EXIT: _ClassVar[Directive.Kind]
    WAIT: Directive.Kind
    RUN: Directive.Kind
    EXIT: Directive.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    ROLE_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    STOP_GRACE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    kind: Directive.Kind
    epoch: int
    round: int
    node_rank: int
    num_nodes: int
    first_rank: int
    local_world_size: int
    world_size: int
    store: str
    role_first_rank: int
    role_world_size: int
    restart_count: int
    stop_grace: float
    exit_code: int
    reason: str
    prepare: bool
    probe: Probe
    ending: Ending
    goes_on: bool
    launch: str
    def __init__(self, kind: _Optional[_Union[Directive.Kind, str]] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., node_rank: _Optional[int] = ..., num_nodes: _Optional[int] = ..., first_rank: _Optional[int] = ..., local_world_size: _Optional[int] = ..., world_size: _Optional[int] = ..., store: _Optional[str] = ..., role_first_rank: _Optional[int] = ..., role_world_size: _Optional[int] = ..., restart_count: _Optional[int] = ..., stop_grace: _Optional[float] = ..., exit_code: _Optional[int] = ..., reason: _Optional[str] = ..., prepare: bool = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., ending: _Optional[_Union[Ending, _Mapping]] = ..., goes_on: bool = ..., launch: _Optional[str] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("kind", "rank", "exception", "fingerprint", "step")
    KIND_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    kind: str
    rank: int
    exception: str
    fingerprint: str
    step: int
    def __init__(self, kind: _Optional[str] = ..., rank: _Optional[int] = ..., exception: _Optional[str] = ..., fingerprint: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("number", "level", "pairs")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    number: int
    level: str
    pairs: Pairs
    def __init__(self, number: _Optional[int] = ..., level: _Optional[str] = ..., pairs: _Optional[_Union[Pairs, _Mapping]] = ...) -> None: ...

class Pairs(_message.Message):
    __slots__ = ("prefix", "node", "nodes", "first", "second", "device", "devices", "deadline", "stores")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    node: int
    nodes: int
    first: _containers.RepeatedScalarFieldContainer[int]
    second: _containers.RepeatedScalarFieldContainer[int]
    device: str
    devices: int
    deadline: float
    stores: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prefix: _Optional[str] = ..., node: _Optional[int] = ..., nodes: _Optional[int] = ..., first: _Optional[_Iterable[int]] = ..., second: _Optional[_Iterable[int]] = ..., device: _Optional[str] = ..., devices: _Optional[int] = ..., deadline: _Optional[float] = ..., stores: _Optional[_Iterable[str]] = ...) -> None: ...

class Probed(_message.Message):
    __slots__ = ("number", "level", "state", "what", "seconds", "device", "devices")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    number: int
    level: str
    state: str
    what: str
    seconds: float
    device: str
    devices: int
    def __init__(self, number: _Optional[int] = ..., level: _Optional[str] = ..., state: _Optional[str] = ..., what: _Optional[str] = ..., seconds: _Optional[float] = ..., device: _Optional[str] = ..., devices: _Optional[int] = ...) -> None: ...

class Paired(_message.Message):
    __slots__ = ("number", "state", "what", "gpu", "matmul", "tests")
    class Test(_message.Message):
        __slots__ = ("passed", "late", "what", "gather")
        PASSED_FIELD_NUMBER: _ClassVar[int]
        LATE_FIELD_NUMBER: _ClassVar[int]
        WHAT_FIELD_NUMBER: _ClassVar[int]
        GATHER_FIELD_NUMBER: _ClassVar[int]
        passed: bool
        late: bool
        what: str
        gather: float
        def __init__(self, passed: bool = ..., late: bool = ..., what: _Optional[str] = ..., gather: _Optional[float] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    MATMUL_FIELD_NUMBER: _ClassVar[int]
    TESTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    state: str
    what: str
    gpu: int
    matmul: _containers.RepeatedScalarFieldContainer[float]
    tests: _containers.RepeatedCompositeFieldContainer[Paired.Test]
    def __init__(self, number: _Optional[int] = ..., state: _Optional[str] = ..., what: _Optional[str] = ..., gpu: _Optional[int] = ..., matmul: _Optional[_Iterable[float]] = ..., tests: _Optional[_Iterable[_Union[Paired.Test, _Mapping]]] = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("round", "phase", "failures", "ended")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        IDLE: _ClassVar[NodeReport.Phase]
        RUNNING: _ClassVar[NodeReport.Phase]
        FINISHED: _ClassVar[NodeReport.Phase]
        FAILED: _ClassVar[NodeReport.Phase]
    IDLE: NodeReport.Phase
    RUNNING: NodeReport.Phase
    FINISHED: NodeReport.Phase
    FAILED: NodeReport.Phase
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    round: int
    phase: NodeReport.Phase
    failures: _containers.RepeatedCompositeFieldContainer[RankFailure]
    ended: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., phase: _Optional[_Union[NodeReport.Phase, str]] = ..., failures: _Optional[_Iterable[_Union[RankFailure, _Mapping]]] = ..., ended: _Optional[_Iterable[int]] = ...) -> None: ...

class RankFailure(_message.Message):
    __slots__ = ("rank", "local_rank", "exit_code", "error_type", "message", "frame", "log_tail", "oom_killed", "what", "kernel_log")
    class What(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RANK: _ClassVar[RankFailure.What]
        STORE: _ClassVar[RankFailure.What]
        START: _ClassVar[RankFailure.What]
        LOG: _ClassVar[RankFailure.What]
        TIMER: _ClassVar[RankFailure.What]
    RANK: RankFailure.What
    STORE: RankFailure.What
    START: RankFailure.What
    LOG: RankFailure.What
    TIMER: RankFailure.What
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    OOM_KILLED_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    KERNEL_LOG_FIELD_NUMBER: _ClassVar[int]
    rank: int
    local_rank: int
    exit_code: int
    error_type: str
    message: str
    frame: str
    log_tail: str
    oom_killed: bool
    what: RankFailure.What
    kernel_log: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., exit_code: _Optional[int] = ..., error_type: _Optional[str] = ..., message: _Optional[str] = ..., frame: _Optional[str] = ..., log_tail: _Optional[str] = ..., oom_killed: bool = ..., what: _Optional[_Union[RankFailure.What, str]] = ..., kernel_log: _Optional[_Iterable[str]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("round", "ranks", "plain", "prepared", "metrics")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    round: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankProgress]
    plain: bool
    prepared: bool
    metrics: str
    def __init__(self, round: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankProgress, _Mapping]]] = ..., plain: bool = ..., prepared: bool = ..., metrics: _Optional[str] = ...) -> None: ...

class RankProgress(_message.Message):
    __slots__ = ("rank", "pid", "step", "ticks", "phase", "started_by", "quiet", "interval", "pace")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TICKS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STARTED_BY_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    step: int
    ticks: int
    phase: str
    started_by: str
    quiet: float
    interval: float
    pace: Pace
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., step: _Optional[int] = ..., ticks: _Optional[int] = ..., phase: _Optional[str] = ..., started_by: _Optional[str] = ..., quiet: _Optional[float] = ..., interval: _Optional[float] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("end", "compute", "waiting", "least", "stage", "device")
    END_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    end: int
    compute: float
    waiting: float
    least: float
    stage: int
    device: PaceOnDevice
    def __init__(self, end: _Optional[int] = ..., compute: _Optional[float] = ..., waiting: _Optional[float] = ..., least: _Optional[float] = ..., stage: _Optional[int] = ..., device: _Optional[_Union[PaceOnDevice, _Mapping]] = ...) -> None: ...

class PaceOnDevice(_message.Message):
    __slots__ = ("compute", "backward", "waiting", "least", "starved")
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    STARVED_FIELD_NUMBER: _ClassVar[int]
    compute: float
    backward: float
    waiting: float
    least: float
    starved: bool
    def __init__(self, compute: _Optional[float] = ..., backward: _Optional[float] = ..., waiting: _Optional[float] = ..., least: _Optional[float] = ..., starved: bool = ...) -> None: ...

class Measure(_message.Message):
    __slots__ = ("round", "steps")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    round: int
    steps: int
    def __init__(self, round: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class Watch(_message.Message):
    __slots__ = ("round", "quiet")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    round: int
    quiet: float
    def __init__(self, round: _Optional[int] = ..., quiet: _Optional[float] = ...) -> None: ...

class Examine(_message.Message):
    __slots__ = ("round", "number", "close")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    round: int
    number: int
    close: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., number: _Optional[int] = ..., close: _Optional[_Iterable[int]] = ...) -> None: ...

class Examined(_message.Message):
    __slots__ = ("round", "number", "looks", "kernel_log")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOOKS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_LOG_FIELD_NUMBER: _ClassVar[int]
    round: int
    number: int
    looks: _containers.RepeatedScalarFieldContainer[str]
    kernel_log: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., number: _Optional[int] = ..., looks: _Optional[_Iterable[str]] = ..., kernel_log: _Optional[_Iterable[str]] = ...) -> None: ...

class SpareStore(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class UnitDeclared(_message.Message):
    __slots__ = ("round", "unit")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    round: int
    unit: int
    def __init__(self, round: _Optional[int] = ..., unit: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason", "drain")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    drain: bool
    def __init__(self, reason: _Optional[str] = ..., drain: bool = ...) -> None: ...

class Sync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Synced(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Moment(_message.Message):
    __slots__ = ("round", "step")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Snapshots(_message.Message):
    __slots__ = ("checkpoint", "holdings", "asks", "wanted", "answer", "base", "replicas", "unfit", "load", "looked", "committed", "damaged", "lost", "left_out", "doubts", "read_only")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOOKED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    DOUBTS_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    asks: int
    wanted: int
    answer: Restore
    base: str
    replicas: bool
    unfit: _containers.RepeatedCompositeFieldContainer[Moment]
    load: int
    looked: Looked
    committed: Moment
    damaged: _containers.RepeatedCompositeFieldContainer[Damage]
    lost: _containers.RepeatedCompositeFieldContainer[Lost]
    left_out: _containers.RepeatedCompositeFieldContainer[Span]
    doubts: _containers.RepeatedCompositeFieldContainer[Doubt]
    read_only: bool
    def __init__(self, checkpoint: _Optional[str] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., asks: _Optional[int] = ..., wanted: _Optional[int] = ..., answer: _Optional[_Union[Restore, _Mapping]] = ..., base: _Optional[str] = ..., replicas: bool = ..., unfit: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ..., load: _Optional[int] = ..., looked: _Optional[_Union[Looked, _Mapping]] = ..., committed: _Optional[_Union[Moment, _Mapping]] = ..., damaged: _Optional[_Iterable[_Union[Damage, _Mapping]]] = ..., lost: _Optional[_Iterable[_Union[Lost, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., doubts: _Optional[_Iterable[_Union[Doubt, _Mapping]]] = ..., read_only: bool = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("moment", "reason")
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    moment: Moment
    reason: str
    def __init__(self, moment: _Optional[_Union[Moment, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("round", "first", "last")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    round: int
    first: int
    last: int
    def __init__(self, round: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Damage(_message.Message):
    __slots__ = ("round", "moment", "from_memory", "what", "later")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    FROM_MEMORY_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    round: int
    moment: Moment
    from_memory: bool
    what: str
    later: bool
    def __init__(self, round: _Optional[int] = ..., moment: _Optional[_Union[Moment, _Mapping]] = ..., from_memory: bool = ..., what: _Optional[str] = ..., later: bool = ...) -> None: ...

class Doubt(_message.Message):
    __slots__ = ("round", "after", "ranks", "what")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    round: int
    after: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    what: str
    def __init__(self, round: _Optional[int] = ..., after: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., what: _Optional[str] = ...) -> None: ...

class StorageLook(_message.Message):
    __slots__ = ("round", "load", "known", "damaged")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    round: int
    load: int
    known: Moment
    damaged: _containers.RepeatedCompositeFieldContainer[Damage]
    def __init__(self, round: _Optional[int] = ..., load: _Optional[int] = ..., known: _Optional[_Union[Moment, _Mapping]] = ..., damaged: _Optional[_Iterable[_Union[Damage, _Mapping]]] = ...) -> None: ...

class Looked(_message.Message):
    __slots__ = ("look", "stored", "error")
    LOOK_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    look: StorageLook
    stored: Moment
    error: str
    def __init__(self, look: _Optional[_Union[StorageLook, _Mapping]] = ..., stored: _Optional[_Union[Moment, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("moment", "world_size", "ranks", "units", "all_units", "persist", "durable", "committed", "nodes", "slot_bytes")
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    ALL_UNITS_FIELD_NUMBER: _ClassVar[int]
    PERSIST_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    moment: Moment
    world_size: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    units: _containers.RepeatedScalarFieldContainer[int]
    all_units: int
    persist: bool
    durable: _containers.RepeatedCompositeFieldContainer[Shard]
    committed: bool
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    slot_bytes: int
    def __init__(self, moment: _Optional[_Union[Moment, _Mapping]] = ..., world_size: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., units: _Optional[_Iterable[int]] = ..., all_units: _Optional[int] = ..., persist: bool = ..., durable: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., committed: bool = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., slot_bytes: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("first_rank", "ranks")
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    first_rank: int
    ranks: int
    def __init__(self, first_rank: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("rank", "bytes", "digest")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    bytes: int
    digest: int
    def __init__(self, rank: _Optional[int] = ..., bytes: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("round", "moment", "from_memory", "sources", "load", "error")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    FROM_MEMORY_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    round: int
    moment: Moment
    from_memory: bool
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    load: int
    error: str
    def __init__(self, round: _Optional[int] = ..., moment: _Optional[_Union[Moment, _Mapping]] = ..., from_memory: bool = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., load: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("base", "ranks", "needed")
    BASE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    base: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    needed: bool
    def __init__(self, base: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., needed: bool = ...) -> None: ...

class SnapshotOrders(_message.Message):
    __slots__ = ("checkpoint", "whole", "all_units", "restore", "flush", "commits", "committed", "pending", "keep", "fetch", "look", "lost", "left_out")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ALL_UNITS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    whole: Moment
    all_units: int
    restore: Restore
    flush: _containers.RepeatedCompositeFieldContainer[Flush]
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    committed: Moment
    pending: bool
    keep: _containers.RepeatedCompositeFieldContainer[Moment]
    fetch: _containers.RepeatedCompositeFieldContainer[Fetch]
    look: StorageLook
    lost: _containers.RepeatedCompositeFieldContainer[Lost]
    left_out: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, checkpoint: _Optional[str] = ..., whole: _Optional[_Union[Moment, _Mapping]] = ..., all_units: _Optional[int] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., flush: _Optional[_Iterable[_Union[Flush, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., committed: _Optional[_Union[Moment, _Mapping]] = ..., pending: bool = ..., keep: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ..., fetch: _Optional[_Iterable[_Union[Fetch, _Mapping]]] = ..., look: _Optional[_Union[StorageLook, _Mapping]] = ..., lost: _Optional[_Iterable[_Union[Lost, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("moment", "rank", "base", "slot_bytes", "all_units")
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALL_UNITS_FIELD_NUMBER: _ClassVar[int]
    moment: Moment
    rank: int
    base: str
    slot_bytes: int
    all_units: int
    def __init__(self, moment: _Optional[_Union[Moment, _Mapping]] = ..., rank: _Optional[int] = ..., base: _Optional[str] = ..., slot_bytes: _Optional[int] = ..., all_units: _Optional[int] = ...) -> None: ...

class Flush(_message.Message):
    __slots__ = ("moment", "ranks")
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    moment: Moment
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, moment: _Optional[_Union[Moment, _Mapping]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("moment", "shards")
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    moment: Moment
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    def __init__(self, moment: _Optional[_Union[Moment, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("checkpoint", "round", "order", "step")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    round: int
    order: int
    step: int
    def __init__(self, checkpoint: _Optional[str] = ..., round: _Optional[int] = ..., order: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Stand(_message.Message):
    __slots__ = ("checkpoint", "round", "order", "next", "waits", "lost")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    round: int
    order: int
    next: int
    waits: int
    lost: str
    def __init__(self, checkpoint: _Optional[str] = ..., round: _Optional[int] = ..., order: _Optional[int] = ..., next: _Optional[int] = ..., waits: _Optional[int] = ..., lost: _Optional[str] = ...) -> None: ...

class Look(_message.Message):
    __slots__ = ("request", "checkpoint", "step")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    request: int
    checkpoint: str
    step: int
    def __init__(self, request: _Optional[int] = ..., checkpoint: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class Found(_message.Message):
    __slots__ = ("request", "moment", "error")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request: int
    moment: Moment
    error: str
    def __init__(self, request: _Optional[int] = ..., moment: _Optional[_Union[Moment, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Status(_message.Message):
    __slots__ = ("run_id", "job_uid", "epoch", "phase", "reason", "round", "world_size", "step", "restarts", "nodes", "report_json", "stale_messages", "version", "metrics_json")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    STALE_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_JSON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job_uid: str
    epoch: int
    phase: str
    reason: str
    round: int
    world_size: int
    step: int
    restarts: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    report_json: str
    stale_messages: int
    version: Version
    metrics_json: str
    def __init__(self, run_id: _Optional[str] = ..., job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., phase: _Optional[str] = ..., reason: _Optional[str] = ..., round: _Optional[int] = ..., world_size: _Optional[int] = ..., step: _Optional[int] = ..., restarts: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., report_json: _Optional[str] = ..., stale_messages: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., metrics_json: _Optional[str] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node_id", "state", "host", "slots", "node_rank", "first_rank", "ranks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    state: str
    host: str
    slots: int
    node_rank: int
    first_rank: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankProgress]
    def __init__(self, node_id: _Optional[str] = ..., state: _Optional[str] = ..., host: _Optional[str] = ..., slots: _Optional[int] = ..., node_rank: _Optional[int] = ..., first_rank: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankProgress, _Mapping]]] = ...) -> None: ...

class ListEventsRequest(_message.Message):
    __slots__ = ("after", "follow")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after: int
    follow: bool
    def __init__(self, after: _Optional[int] = ..., follow: bool = ...) -> None: ...

class EventRecord(_message.Message):
    __slots__ = ("sequence", "time", "job_time", "kind", "reason", "detail_json")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    JOB_TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_JSON_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: float
    job_time: float
    kind: str
    reason: str
    detail_json: str
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[float] = ..., job_time: _Optional[float] = ..., kind: _Optional[str] = ..., reason: _Optional[str] = ..., detail_json: _Optional[str] = ...) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("request", "rank", "attempt", "stream", "follow", "tail_bytes", "cancel")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    TAIL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    request: int
    rank: int
    attempt: int
    stream: str
    follow: bool
    tail_bytes: int
    cancel: bool
    def __init__(self, request: _Optional[int] = ..., rank: _Optional[int] = ..., attempt: _Optional[int] = ..., stream: _Optional[str] = ..., follow: bool = ..., tail_bytes: _Optional[int] = ..., cancel: bool = ...) -> None: ...

class LogChunk(_message.Message):
    __slots__ = ("request", "data", "end", "error")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request: int
    data: bytes
    end: bool
    error: str
    def __init__(self, request: _Optional[int] = ..., data: _Optional[bytes] = ..., end: bool = ..., error: _Optional[str] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("reason", "from_step")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    reason: str
    from_step: int
    def __init__(self, reason: _Optional[str] = ..., from_step: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node_id", "reason")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    reason: str
    def __init__(self, node_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...
