"""The flags of `elastic-run`: torchrun's, name for name and default for default, and ours."""

from elastic import values
from elastic.master.policy import HANG_ACTIONS, PRECHECKS
from elastic.parser import Flag

EXIT_CODES = ("torchrun", "detailed")

TORCHRUN = (
    Flag(
        name="nnodes",
        metavar="MIN:MAX",
        default="1:1",
        help="Nodes: a number, or MIN:MAX to be elastic (1:1).",
    ),
    Flag(
        name="nproc-per-node",
        metavar="N",
        default="1",
        help="Ranks a node: a number, gpu, cpu, xpu or auto (1).",
    ),
    Flag(
        name="rdzv-backend",
        metavar="NAME",
        default="static",
        help="static or c10d; our master serves both (static).",
    ),
    Flag(
        name="rdzv-endpoint",
        metavar="HOST:PORT",
        default="",
        help="Where the master is; the port may be left out (29400).",
    ),
    Flag(name="rdzv-id", metavar="ID", default="none", help="Id of the job (none)."),
    Flag(
        name="rdzv-conf",
        metavar="KEY=VALUE,...",
        default="",
        help="join_timeout, last_call_timeout (seconds), is_host.",
    ),
    Flag(
        name="standalone",
        switch=True,
        help="One node, a free port on loopback; the rdzv flags are then ignored.",
    ),
    Flag(
        name="max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="Restarts after failures of the script itself (%(default)s); for lost nodes and the "
        "like there is --fault-budget.",
    ),
    Flag(
        name="monitor-interval",
        metavar="SECONDS",
        type=float,
        default=0.1,
        help="Without effect: nothing is polled, deaths are seen at once.",
    ),
    Flag(
        name="start-method",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        help="Without effect: see --rank-start.",
    ),
    Flag(
        name="event-log-handler", metavar="NAME", default="null", help="Name of an event handler."
    ),
    Flag(
        name="role",
        metavar="NAME",
        default="default",
        help="Role of the ranks, in their environment and logs (%(default)s).",
    ),
    Flag(name="module", short="m", switch=True, help="Run a module, as 'python -m' does."),
    Flag(name="no-python", switch=True, help="Run a program that is no Python script."),
    Flag(
        name="run-path", switch=True, help="Run the script by runpy.run_path; before --no-python."
    ),
    Flag(
        name="log-dir",
        metavar="DIR",
        help="Folder for log files; a folder of its own in it for every run.",
    ),
    Flag(
        name="redirects",
        metavar="STREAMS",
        short="r",
        default="0",
        help="Streams that go to log files: 0 none, 1 stdout, 2 stderr, 3 both, or a map from "
        "local rank such as 0:3,1:2.",
    ),
    Flag(
        name="tee",
        metavar="STREAMS",
        short="t",
        default="0",
        help="The same, and to the console as well.",
    ),
    Flag(
        name="local-ranks-filter",
        metavar="RANKS",
        default="",
        help="Local ranks that the console shows, as 0,1.",
    ),
    Flag(
        name="duplicate-stdout-filters",
        metavar="WORDS",
        type=values.comma_separated_list,
        default=[],
        help="Words; teed stdout lines with one of them are also copied to a file. ',,' is a comma.",
    ),
    Flag(
        name="duplicate-stderr-filters",
        metavar="WORDS",
        type=values.comma_separated_list,
        default=[],
        help="The same for stderr.",
    ),
    Flag(
        name="node-rank",
        metavar="N",
        type=int,
        default=0,
        help="Place of this node; 0 has the master (static).",
    ),
    Flag(
        name="master-addr", metavar="HOST", default="127.0.0.1", help="Address of node 0 (static)."
    ),
    Flag(
        name="master-port",
        metavar="PORT",
        type=int,
        help="Port of node 0 (static); 29500 if not given.",
    ),
    Flag(name="local-addr", metavar="HOST", help="Address at which others reach this node."),
    Flag(
        name="logs-specs",
        metavar="NAME",
        in_environment=False,
        help="Entry point of group torchrun.logs_specs.",
    ),
    Flag(
        name="numa-binding",
        choices=("node", "socket", "exclusive", "core-complex"),
        in_environment=False,
        help="Bind each rank to CPUs near its GPU.",
    ),
    Flag(
        name="signals-to-handle",
        metavar="NAMES",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help="Signals that are passed on to the ranks and end the job (%(default)s).",
    ),
    Flag(
        name="shutdown-timeout",
        metavar="SECONDS",
        type=int,
        help="From a signal until SIGKILL, which a second ^C sends at once; else "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30.",
    ),
    Flag(
        name="virtual-local-rank",
        switch=True,
        help="LOCAL_RANK is 0 for all, and each rank sees its own GPU alone.",
    ),
)
"""torchrun's flags, in torchrun's order (argparse lists ambiguous matches in it)."""

USE_ENV = Flag(
    name="use-env",
    switch=True,
    in_environment=False,
    help="Ranks find their local rank in LOCAL_RANK alone; else also as the script's first "
    "argument, --local-rank=N.",
)
"""torch.distributed.launch's own flag."""

OURS = (
    Flag(name="node-unit", type=int, default=1, metavar="N", help="Nodes: only multiples of N."),
    Flag(
        name="rank-unit", type=int, default=1, metavar="N", help="World size: only multiples of N."
    ),
    Flag(
        name="rank-start",
        default="auto",
        choices=("auto", "fork", "spawn"),
        help="auto: fork ranks from a standby process once one is ready; fork: from the first, so that a node imports "
        "torch once, before the script could set what torch reads then; spawn: always a new Python.",
    ),
    Flag(
        name="spare-ranks",
        default="auto",
        choices=("auto", "off"),
        help="auto: keep ranks started ahead where device memory allows.",
    ),
    Flag(
        name="precheck",
        default="",
        choices=(*PRECHECKS, "0", "1", "2"),
        help="Try each node's devices, memory and disk before its ranks run, then nodes two by two, for seconds (quick) "
        "or minutes (full), and keep out what is faulty; 0, 1 and 2 are the same three (quick for several nodes, off "
        "for one and with --standalone).",
    ),
    Flag(
        name="probe-only",
        switch=True,
        help="End once all nodes have been tried, with exit code 1 if one of them is faulty; no script runs.",
    ),
    Flag(
        name="hang-action",
        default="recover",
        choices=HANG_ACTIONS,
        help="What happens to a round that hangs: its ranks are restarted, or it is only told of, "
        "or the job fails, or nobody looks (%(default)s).",
    ),
    Flag(
        name="hang-floor",
        type=values.seconds,
        default=1.2,
        metavar="SECONDS",
        help="A round that has gone without a step for less is never taken for one that hangs, "
        "unless a process of it is stopped; "
        "beyond it, its own steps say how long they may take (%(default)g). Before its first step "
        "it is 50 times as long, at most a minute or the floor itself.",
    ),
    Flag(
        name="notify",
        type=values.notify,
        default=[],
        repeat=True,
        metavar="TARGET",
        help="Tell a URL (http or https: POST) or a shell command (stdin) in JSON of a node that is kept out or lost, "
        "replicas that differ, a hang, a failure and its diagnosis, and the job's end; where the master is. May be repeated.",
    ),
    Flag(
        name="straggler-interval",
        type=values.seconds,
        default=5.0,
        metavar="SECONDS",
        help="Ranks' times are compared again and again, each time of the steps of so many seconds (%(default)g).",
    ),
    Flag(
        name="failure-grace",
        type=values.seconds,
        default=0.0,
        metavar="SECONDS",
        help="From SIGTERM to SIGKILL for ranks that survive a failed round (%(default)g).",
    ),
    Flag(
        name="drain-timeout",
        type=values.seconds,
        default=60.0,
        metavar="SECONDS",
        help="Time a drained node has to save and leave (%(default)g).",
    ),
    Flag(
        name="below-min-timeout",
        type=values.seconds,
        metavar="SECONDS",
        help="Give up after so long with fewer nodes than the minimum (never).",
    ),
    Flag(
        name="join-timeout",
        type=values.seconds,
        default=600.0,
        metavar="SECONDS",
        help="Time for the first nodes to come together (%(default)g); --rdzv-conf join_timeout wins.",
    ),
    Flag(
        name="last-call",
        type=values.seconds,
        default=1.0,
        metavar="SECONDS",
        help="Wait for nodes on their way once there are enough (%(default)g); "
        "--rdzv-conf last_call_timeout wins.",
    ),
    Flag(
        name="preparation",
        type=values.seconds,
        default=15.0,
        metavar="SECONDS",
        help="Time for a node that joins to import what its ranks will, before the others stop for it "
        "(%(default)g).",
    ),
    Flag(
        name="lease",
        type=values.seconds,
        default=5.0,
        metavar="SECONDS",
        help="A node that is silent for so long is probed and given up (%(default)g).",
    ),
    Flag(
        name="fault-budget",
        type=int,
        default=100,
        metavar="N",
        help="Recoveries in a row from faults that are not the script's (%(default)s); grows back "
        "with progress.",
    ),
    Flag(
        name="state-dir", metavar="DIR", help="Where the master's journal and the job's state live."
    ),
    Flag(name="report", metavar="FILE", help="Write a report of the job's end as JSON."),
    Flag(
        name="exit-codes",
        default="torchrun",
        choices=EXIT_CODES,
        help="torchrun: 1 for whatever fails (%(default)s). detailed: 210 no master, 211 health check failed, 212 drained "
        "as a straggler, 214 too few nodes came in time, 215 a hang, 216 too few nodes are left. An ElasticJob's pods have "
        "these.",
    ),
    Flag(
        name="termination-log",
        metavar="FILE",
        default="/dev/termination-log",
        help="Where the cause of this launcher's end goes as JSON, if the file exists (%(default)s).",
    ),
    Flag(name="node-id", metavar="NAME", help="Lasting name of this node (made up if not given)."),
    Flag(
        name="label",
        type=values.labels,
        default=[],
        repeat=True,
        metavar="KEY=VALUE",
        help="Where this node is (rack=r7); neighbours get neighbouring ranks. May be repeated.",
    ),
    Flag(
        name="port-range",
        type=values.port_range,
        metavar="LO-HI",
        help="Ports for whatever listens on this node (any free port).",
    ),
    Flag(name="token-file", metavar="FILE", help="File with the job's token."),
    Flag(name="require-token", switch=True, help="Let nobody in who does not show the token."),
    Flag(name="tls-cert", metavar="FILE", help="Certificate of this node (PEM)."),
    Flag(name="tls-key", metavar="FILE", help="Its key (PEM)."),
    Flag(
        name="tls-ca", metavar="FILE", help="Authority that signed every node's certificate (PEM)."
    ),
    Flag(
        name="log-keep",
        type=int,
        default=100,
        metavar="N",
        help="Attempts whose logs are kept, the first and the newest always (%(default)s).",
    ),
    Flag(
        name="log-limit",
        type=values.byte_size,
        default=1024**3,
        metavar="BYTES",
        help="Most that one log file holds: 512M, 1G, ...; 0 for no limit (1G).",
    ),
)
"""Flags that torchrun does not have; ELASTIC_<NAME> gives a default."""
