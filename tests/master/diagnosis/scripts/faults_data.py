"""What goes wrong with files: data, checkpoints, disks, shared memory, numbers."""

import argparse
import ctypes
import gzip
import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

Args = argparse.Namespace
CLONE_NEWNS = 0x20000


def _own_mounts() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _small_disk(at: str, size: str) -> Path:
    _own_mounts()
    Path(at).mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "scratch", at], check=True)
    return Path(at)


# --- data ---


def bad_json(args: Args) -> None:
    line = '{"text": "once upon' if args.variant else '{"text": tru}'
    json.loads(line)


def not_utf8(args: Args) -> None:
    Path("shard-0007.txt").write_bytes(b"caf\xe9 \xff\xfe tokens\n")
    Path("shard-0007.txt").read_text(encoding="utf-8")


def bad_zip(args: Args) -> None:
    Path("images.zip").write_bytes(b"PK\x05\x06 cut")
    zipfile.ZipFile("images.zip")


def zip_checksum(args: Args) -> None:
    with zipfile.ZipFile("part.zip", "w") as archive:
        archive.writestr("0.txt", "tokens " * 40)
    raw = bytearray(Path("part.zip").read_bytes())
    raw[60] ^= 0xFF
    Path("part.zip").write_bytes(raw)
    zipfile.ZipFile("part.zip").read("0.txt")


def cut_gzip(args: Args) -> None:
    with gzip.open("tokens.gz", "wb") as file:
        file.write(os.urandom(4096))
    raw = Path("tokens.gz").read_bytes()
    if args.variant:
        Path("tokens.gz").write_bytes(b"<html>" + raw)
    else:
        Path("tokens.gz").write_bytes(raw[:-200])
    with gzip.open("tokens.gz") as file:
        file.read()


def bad_tar(args: Args) -> None:
    Path("shard-000012.tar").write_bytes(b"\0" * 100 + b"x" * 1000)
    with tarfile.open("shard-000012.tar"):
        pass


def bad_image(args: Args) -> None:
    from PIL import Image

    if args.variant:
        Image.effect_noise((64, 64), 50).save("n01440764_10026.png")
        raw = Path("n01440764_10026.png").read_bytes()
        Path("n01440764_10026.png").write_bytes(raw[:600])
        Image.open("n01440764_10026.png").load()
    else:
        Path("n01440764_10026.JPEG").write_bytes(b"not an image")
        Image.open("n01440764_10026.JPEG")


def short_record(args: Args) -> None:
    struct.unpack("<QQ", b"12345678abc")


def short_memmap(args: Args) -> None:
    import numpy as np

    np.zeros(100, dtype=np.uint16).tofile("train.bin")
    np.memmap("train.bin", dtype=np.uint16, mode="r", shape=(4096,))


def bad_npy(args: Args) -> None:
    import numpy as np

    np.save("index.npy", np.arange(100))
    Path("index.npy").write_bytes(Path("index.npy").read_bytes()[:300])
    np.load("index.npy")


# --- workers that load it ---


class Rows:
    """What a worker does at its third row."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        import torch

        if index == 3 and self.what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 3 and self.what == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        if index == 3 and self.what == "segfault":
            ctypes.string_at(0)
        if index == 3 and self.what == "exits":
            os._exit(1)
        if index == 3 and self.what == "hangs":
            time.sleep(60)
        if index == 3 and self.what == "corrupt":
            json.loads('{"text": ')
        if index == 3 and self.what == "bad disk":
            Path("disk/data").read_bytes()
        if index == 3 and self.what == "bug":
            return dict[str, int]()["label"]
        return torch.zeros(1 << 18 if self.what == "large" else 8)


def _load(what: str, **options: Any) -> None:
    import torch

    rows: Any = Rows(what)
    for _ in torch.utils.data.DataLoader(rows, num_workers=2, batch_size=2, **options):
        pass


def worker_killed(args: Args) -> None:
    _load("terminated" if args.variant else "killed")


def worker_segfault(args: Args) -> None:
    _load("segfault")


def worker_exits(args: Args) -> None:
    _load("exits")


def worker_hangs(args: Args) -> None:
    _load("hangs", timeout=2)


def worker_corrupt(args: Args) -> None:
    _load("corrupt")


def bad_disk(args: Args) -> None:
    """`disk/data` is on a file system that fails, `readonly` on one that is mounted so."""
    import torch

    match args.variant:
        case 0:
            Path("disk/data").read_bytes()
        case 1:
            torch.load("disk/data")
        case 2:
            _load("bad disk")
        case _:
            torch.save({"step": 2}, "readonly/checkpoint.pt")


def worker_bug(args: Args) -> None:
    _load("bug")


def shm_small(args: Args) -> None:
    _own_mounts()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "shm", "/dev/shm"], check=True)
    _load("large", **({"prefetch_factor": 8} if args.variant else {}))


# --- checkpoints ---


def _checkpoint(name: str) -> Path:
    import torch

    torch.save({"weight": torch.zeros(4096), "step": 40}, name)
    return Path(name)


def cut_checkpoint(args: Args) -> None:
    import torch

    path = _checkpoint("step_40.pt")
    raw = path.read_bytes()
    path.write_bytes([raw[:-600], b"", raw[: len(raw) // 2]][args.variant])
    torch.load(path)


def overwritten_checkpoint(args: Args) -> None:
    import torch

    path = _checkpoint("model.pt")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    torch.load(path)


def flipped_checkpoint(args: Args) -> None:
    import torch

    path = _checkpoint("optim.pt")
    raw = bytearray(path.read_bytes())
    at = raw.find(b"data.pkl")
    raw[at + 30 : at + 60] = os.urandom(30)
    path.write_bytes(raw)
    torch.load(path)


def bad_safetensors(args: Args) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    save_file({"weight": torch.zeros(64)}, "model-00003-of-00004.safetensors")
    path = Path("model-00003-of-00004.safetensors")
    raw = path.read_bytes()
    path.write_bytes([raw[:-64], b"\xff" * 64, raw[:6]][args.variant])
    load_file(path)


def missing_shard(args: Args) -> None:
    from torch.distributed.checkpoint import load  # type: ignore[attr-defined]

    load({"step": 1}, checkpoint_id="checkpoints/step_40", no_dist=True)


def other_model(args: Args) -> None:
    import torch

    state = torch.nn.Linear(16, 64).state_dict()
    if args.variant:
        state = {f"module.{name}": value for name, value in state.items()}
    torch.nn.Linear(16, 32 if not args.variant else 64).load_state_dict(state)


def other_groups(args: Args) -> None:
    import torch

    one = torch.optim.SGD([torch.ones(1)], lr=0.1)
    two = torch.optim.SGD([{"params": [torch.ones(1)]}, {"params": [torch.ones(1)]}], lr=0.1)
    two.load_state_dict(one.state_dict())


# --- disks ---


def disk_full(args: Args) -> None:
    import numpy as np
    import torch

    disk = _small_disk("checkpoints", "1m")
    match args.variant:
        case 0:
            torch.save(torch.zeros(1 << 20), disk / "step_40.pt")
        case 1:
            (disk / "log.txt").write_bytes(bytes(1 << 21))
        case 2:
            np.zeros(1 << 20).tofile(disk / "cache.bin")
        case 3:
            from safetensors.torch import save_file

            save_file({"weight": torch.zeros(1 << 20)}, disk / "model.safetensors")
        case 4:
            from torch.distributed.checkpoint import save  # type: ignore[attr-defined]

            save({"weight": torch.zeros(1 << 20)}, checkpoint_id=disk / "dcp", no_dist=True)


def no_inodes(args: Args) -> None:
    _own_mounts()
    Path("cache").mkdir(exist_ok=True)
    options = "size=4m,nr_inodes=10"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "scratch", "cache"], check=True)
    for number in range(20):
        Path(f"cache/{number}.json").write_text("{}")


def read_only(args: Args) -> None:
    _small_disk("outputs", "1m")
    subprocess.run(["mount", "-o", "remount,ro", "outputs"], check=True)
    Path("outputs/config.json").write_text("{}")


def denied(args: Args) -> None:
    Path("secrets.json").write_text("{}")
    os.chmod("secrets.json", 0o600)
    os.setuid(65534)
    if args.variant == 1:
        os.mkdir("/var/lib/checkpoints")
    if args.variant == 2:
        os.kill(1, 0)
    Path("secrets.json").read_text()


def missing(args: Args) -> None:
    names = ["/data/c4/train-00000.arrow", "tokenizer.model", "/mnt/nfs/ckpt/latest"]
    Path(names[args.variant]).read_bytes()


def missing_folder(args: Args) -> None:
    os.listdir("/data/imagenet/train")


def missing_program(args: Args) -> None:
    subprocess.run(["nvidia-fabric-check", "--quick"], check=True)


# --- limits ---


def too_many_files(args: Args) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    if args.variant:
        import socket

        ends = [socket.socket() for _ in range(300)]
    files = [open(os.devnull) for _ in range(300)]  # noqa: SIM115
    del files, ends


def file_too_large(args: Args) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    Path("model.bin").write_bytes(bytes(1 << 20))


def too_many_processes(args: Args) -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    os.setuid(65534)
    if args.variant:
        import threading

        threading.Thread(target=print).start()
    os.fork()


def cpu_time(args: Args) -> None:
    used = int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used, used + 5))
    while True:
        pass


def no_address_space(args: Args) -> None:
    import numpy as np
    import torch

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
    match args.variant:
        case 0:
            torch.zeros(1 << 28)
        case 1:
            np.zeros(1 << 28)
        case 2:
            bytearray(1 << 30)
        case 3:
            os.fork()
            mmap.mmap(-1, 1 << 30)


def cannot_allocate(args: Args) -> None:
    import torch

    torch.zeros(1 << 50, dtype=torch.uint8)


# --- numbers ---


def nan_loss(args: Args) -> None:
    texts: list[Exception] = [
        ValueError("Loss is nan, stopping training"),
        FloatingPointError("non-finite gradient norm at step 2: nan"),
        RuntimeError("step 2: loss is inf on this rank"),
    ]
    raise texts[args.variant]


def nan_anomaly(args: Args) -> None:
    import torch

    with torch.autograd.set_detect_anomaly(True):
        weight = torch.zeros(4, requires_grad=True)
        (torch.sqrt(weight) * 0).sum().backward()  # type: ignore[no-untyped-call]


def nan_clip(args: Args) -> None:
    import torch

    weight = torch.ones(4, requires_grad=True)
    weight.grad = torch.full((4,), float("nan"))
    torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def nan_probabilities(args: Args) -> None:
    import torch

    torch.multinomial(torch.full((4,), float("nan")), 1)


def nan_distribution(args: Args) -> None:
    import torch

    torch.distributions.Normal(torch.tensor([float("nan")]), torch.ones(1))
