"""One container: `python -I -S sandbox.py SPEC.json`, a process between the kubelet and the command.

It makes a mount, process and host-name namespace with a root of its own, in which this machine's
files are the image, runs the command as process 1, passes SIGTERM on to it and exits with its
exit code, 128 and the signal's number where one ended it. The kernel ends the command with this
process, and this process with the kubelet. Only the standard library: it runs without a venv.
"""

import ctypes
import json
import os
import signal
import stat
import sys
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWPID = 0x00020000, 0x04000000, 0x20000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
_DETACH = 2
_PDEATHSIG = 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

OWN = ("dev", "proc", "run", "lost+found")
"""Not this machine's: a container has its own."""


def main() -> NoReturn:
    """Set up, run, exit as the command did."""
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    _check(_LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    for group in spec["cgroups"]:
        with open(os.path.join(group, "cgroup.procs"), "w") as file:
            file.write("0")
    try:
        own_mounts(_NEWUTS | _NEWPID)
        name = spec["hostname"].encode()
        _check(_LIBC.sethostname(name, len(name)), "sethostname")
        _make_root(spec)
    except OSError as error:
        _refuse(spec, str(error))
    # Held back until there is somebody to pass it on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid == 0:
        _become(spec)
    os.close(spec["refusal"])  # its other end sees an end of file once the command runs
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(128 - code if code < 0 else code)


def _make_root(spec: dict[str, Any]) -> None:
    """Mount everything below `spec["root"]`, an empty folder."""
    root = spec["root"]
    mount("tmpfs", root, "tmpfs", 0, "size=64m,mode=755")
    for name in OWN[:3]:
        os.mkdir(f"{root}/{name}")
    _mirror("/", root, OWN)
    mount("tmpfs", f"{root}/dev", "tmpfs", 0, "size=1m,mode=755")
    _mirror("/dev", f"{root}/dev", ("shm", "termination-log"))
    os.mkdir(f"{root}/dev/shm")
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", 0, f"size={spec['shm_bytes']}")
    for bind in spec["binds"]:
        target = root + _within(bind["target"])
        _make_target(target, folder=os.path.isdir(bind["source"]))
        mount(bind["source"], target, None, _BIND | _REC)
        if bind["read_only"]:
            mount("none", target, None, _BIND | _REMOUNT | _RDONLY)


def _within(path: str) -> str:
    """As a path below the root; links such as /var/run are followed here, where they mean the same."""
    return "/run" + path[len("/var/run") :] if path.startswith("/var/run/") else path


def _mirror(source: str, target: str, skipped: tuple[str, ...]) -> None:
    for entry in os.scandir(source):
        path = f"{target}/{entry.name}"
        if entry.name in skipped:
            continue
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), path)
        elif stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
            continue
        else:
            _make_target(path, folder=entry.is_dir())
            mount(entry.path, path, None, _BIND | _REC)


def _make_target(path: str, *, folder: bool) -> None:
    if os.path.exists(path):
        return
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def _become(spec: dict[str, Any]) -> NoReturn:
    """Process 1 of the container."""
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    root = spec["root"]
    try:
        mount("proc", f"{root}/proc", "proc", 0)
        os.chdir(root)
        _check(_LIBC.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
        _check(_LIBC.umount2(b".", _DETACH), "umount")
        os.makedirs(spec["cwd"], exist_ok=True)
        os.chdir(spec["cwd"])
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.set_inheritable(spec["refusal"], False)
        os.execvpe(spec["command"][0], spec["command"], spec["environ"])
    except OSError as error:
        _refuse(spec, f"{spec['command'][0]}: {error.strerror}")


def _refuse(spec: dict[str, Any], message: str) -> NoReturn:
    """The container could not start: the reason for the kubelet, through what it opened for us."""
    os.write(spec["refusal"], message.encode())
    os._exit(128)


def own_mounts(more: int = 0) -> None:
    """From here on this process and its children mount for themselves alone."""
    _check(_LIBC.unshare(_NEWNS | more), "unshare")
    mount("none", "/", None, _REC | _PRIVATE)


def mount_memory(target: str, size: int | None) -> None:
    """A folder in memory; None: no limit of its own."""
    mount("tmpfs", target, "tmpfs", 0, f"size={size}" if size else "")


def unmount(target: str) -> None:
    """Lazily: who has files open there keeps them."""
    _check(_LIBC.umount2(target.encode(), _DETACH), f"umount {target}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2); raises OSError."""
    code = _LIBC.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode()
    )
    _check(code, f"mount {source} at {target}")


def _check(code: int, what: str) -> None:
    if code == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
