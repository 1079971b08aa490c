"""A rank that writes down what it was given, then does what PROBE says.

Corpus scripts import nothing of ours, and torch only where they must. Read: PROBE_OUT (a folder),
PROBE (what to do), PROBE_RANKS (who does it), PROBE_OTHERS (what the others do), PROBE_NODE.
"""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
DEADLINE_S = 90.0


def out_path(kind: str) -> str:
    """`<out>/<kind>.<node>.<rank>.<restart count>`, so that no two ranks share a file."""
    env = os.environ
    names = (
        env.get("PROBE_NODE", "0"),
        env.get("RANK", "x"),
        env.get("TORCHELASTIC_RESTART_COUNT", "x"),
    )
    return os.path.join(env["PROBE_OUT"], ".".join((kind, *names)))


def write(kind: str, value: object) -> None:
    """Replace the file whole, so that a reader never sees half of it."""
    path = out_path(kind)
    with open(path + ".part", "w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
    os.replace(path + ".part", path)


def count(start: str, end: str) -> int:
    """Files in the out folder that are named so."""
    names = os.listdir(os.environ["PROBE_OUT"])
    return len([name for name in names if name.startswith(start) and name.endswith(end)])


def open_files() -> "dict[str, str]":
    """Descriptor -> what it is, without the one that listing the folder opens."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(fd))
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return found


def signal_masks() -> "dict[str, list[str]]":
    """Blocked, ignored and caught signals, as the kernel has them."""
    masks = {}
    with open("/proc/self/status") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key in ("SigBlk", "SigIgn", "SigCgt"):
                bits = int(value, 16)
                masks[key] = [n.name for n in signal.Signals if bits >> (n - 1) & 1]
    return masks


def is_pipe(path: str) -> bool:
    """Whether there is a named pipe."""
    return os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode)


def command_line() -> "list[str]":
    """As `ps` shows it."""
    with open("/proc/self/cmdline") as file:
        return file.read().split("\0")[:-1]


def observe(main_name: str, main_file: "str | None") -> "dict[str, object]":
    """Everything about this process that a script might depend on."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
    cwd = os.getcwd()
    umask = os.umask(0)
    os.umask(umask)
    standard = {}
    for fd in (0, 1, 2):
        mode = os.fstat(fd).st_mode
        kind = "pipe" if stat.S_ISFIFO(mode) else "device" if stat.S_ISCHR(mode) else "file"
        standard[str(fd)] = {"kind": kind, "isatty": os.isatty(fd)}
    main = sys.modules["__main__"]
    return {
        "env": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "cmdline": command_line(),
        "cwd": cwd,
        "pwd_matches": os.environ.get("PWD") == cwd,
        "path": sys.path,
        "name": main_name,
        "file": main_file,
        "main_file": getattr(main, "__file__", None),
        "main_package": getattr(main, "__package__", None),
        "main_spec": getattr(getattr(main, "__spec__", None), "name", None),
        "main_names": sorted(k for k in vars(main) if k.startswith("__")),
        "outermost_frame": os.path.basename(frame.f_code.co_filename),
        "flags": {k: getattr(sys.flags, k) for k in ("optimize", "isolated", "no_site")},
        "executable": sys.executable,
        "prefix": sys.prefix,
        "write_through": {
            n: getattr(getattr(sys, n), "write_through", None) for n in ("stdout", "stderr")
        },
        "line_buffering": {n: getattr(sys, n).line_buffering for n in ("stdout", "stderr")},
        "encoding": {n: getattr(sys, n).encoding for n in ("stdin", "stdout", "stderr")},
        "standard": standard,
        "fds": open_files(),
        "leads_session": os.getsid(0) == os.getpid(),
        "leads_group": os.getpgid(0) == os.getpid(),
        "ppid": os.getppid(),
        "umask": umask,
        "nice": os.nice(0),
        "signals": signal_masks(),
        "python_signals": {s.name: str(signal.getsignal(s)) for s in WATCHED},
        "affinity": sorted(os.sched_getaffinity(0)),
        "limits": {
            n: resource.getrlimit(getattr(resource, n)) for n in ("RLIMIT_CORE", "RLIMIT_NOFILE")
        },
        "python_threads": threading.active_count(),
        "os_threads": len(os.listdir("/proc/self/task")),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "torch_preloaded": "torch" in sys.modules,
        "timer_pipe": is_pipe(os.environ.get("TORCHELASTIC_TIMER_FILE", "")),
        "hashes": hash("a") if os.environ.get("PYTHONHASHSEED") else None,
    }


def warm_up() -> None:
    """In the first round only, give a launcher time to learn the script, then have it restart."""
    path = os.path.join(os.environ["PROBE_OUT"], "warm")
    if not os.path.exists(path) or os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0":
        return
    with open(path) as file:
        title = file.read()
    if title:
        import torch  # noqa: F401
    if os.environ.get("LOCAL_RANK") == "0":
        await_quiet(title)
        write("warmed", None)
    # torchrun's nodes restart each for itself (static), or count so (c10d): one rank of each fails
    if os.environ.get("LOCAL_RANK" if not title else "RANK") == "0":
        while count("warmed.", ".0") < int(os.environ["GROUP_WORLD_SIZE"]):
            time.sleep(0.01)
        os._exit(9)
    time.sleep(DEADLINE_S)


def await_quiet(title: str) -> None:
    """Wait until a sibling of this title has imported torch and rests; no title: wait for none."""
    quiet, before = 0, ""
    end = time.monotonic() + DEADLINE_S
    while title and quiet < 10 and time.monotonic() < end:
        time.sleep(0.1)
        state = resting(title)
        quiet = quiet + 1 if state and state == before else 0
        before = state


def resting(title: str) -> str:
    """Who of the siblings of this title rests, and its processor time; empty while one is busy."""
    parents, states = {}, {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                if file.read().rstrip("\0 ") != title:
                    continue
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            with open(f"/proc/{pid}/maps") as file:
                loaded = "libtorch_python" in file.read()
        except OSError:
            continue
        parents[pid] = int(fields[1])
        states[pid] = " ".join((pid, *fields[11:13])) if loaded and fields[0] == "S" else ""
    ours = [pid for pid, parent in parents.items() if parent == os.getppid()]
    trials = [pid for pid, parent in parents.items() if str(parent) in ours]
    if trials or not ours or not all(states[pid] for pid in ours):
        return ""
    return ", ".join(sorted(states[pid] for pid in ours))


def listen(takes: float = 0.0) -> "list[str]":
    """Note each signal from now on, `takes` seconds after it came, in the list that is returned."""
    seen: list[str] = []

    def handler(number: int, _: object) -> None:
        time.sleep(takes)
        seen.append(signal.Signals(number).name)
        write("signals", seen)

    for number in WATCHED:
        signal.signal(number, handler)
    return seen


def wait_for_signal(seen: "list[str]", leave: bool) -> None:
    """With `leave`, exit 0 after the first signal (and what follows at once)."""
    write("ready", os.getpid())
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        time.sleep(0.1)
        if seen and leave:
            time.sleep(0.3)
            return


def all_have_spoken() -> None:
    """Wait until each rank of this round has printed, so that no failure cuts another short."""
    write("said", None)
    round_ = os.environ.get("TORCHELASTIC_RESTART_COUNT", "x")
    if round_ != "0" and "-first" in os.environ.get("PROBE", ""):
        return  # nothing fails in this round, and it may not have all ranks
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if count("said.", "." + round_) >= int(os.environ.get("WORLD_SIZE", "1")):
            return
        time.sleep(0.05)


def act(what: str, seen: "list[str]") -> None:
    """Do one thing; `kind:value`."""
    kind, _, value = what.partition(":")
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if kind == "exit" or (kind == "exit-first" and first):
        sys.exit(int(value))
    elif kind == "raise":
        raise RuntimeError("@@ boom")
    elif kind == "text":
        sys.exit("@@ text")
    elif kind == "kill" or (kind == "kill-first" and first):
        os.kill(os.getpid(), int(value))
        time.sleep(DEADLINE_S)
    elif kind in ("wait", "save"):
        wait_for_signal(seen, leave=True)
    elif kind == "stay":
        wait_for_signal(seen, leave=False)
    elif kind == "sleep":
        time.sleep(float(value))
    elif kind == "print":
        for _ in range(int(value)):
            sys.stdout.write("@@ one more of many lines\n")
    elif kind == "read":
        print("@@ read", sys.stdin.readline().strip())
    elif kind == "child":
        child = subprocess.Popen(["sleep", "60"], start_new_session=value == "session")
        write("child", child.pid)
        sys.exit(int(os.environ.get("PROBE_CODE", "0")))


def main(main_name: str, main_file: "str | None") -> None:
    """Warm up, write down, print, act."""
    warm_up()
    write("rank", observe(main_name, main_file))
    write("pid", os.getpid())
    rank = os.environ.get("RANK", "x")
    for line in ("first", "keep this", "last"):
        # In one write each: eight ranks share one descriptor, and print() writes the end apart.
        sys.stdout.write(f"@@ out {rank} {line}\n")
        sys.stderr.write(f"@@ err {rank} {line}\n")
    ranks = os.environ.get("PROBE_RANKS")
    mine = ranks is None or rank in ranks.split(",")
    what = os.environ.get("PROBE" if mine else "PROBE_OTHERS", "")
    listens = what in ("wait", "stay", "save")
    # before anybody fails
    seen = listen(takes=1.0 if what == "save" else 0.0) if listens else []
    all_have_spoken()
    act(what, seen)


if __name__ == "__main__":
    main(__name__, __file__)
