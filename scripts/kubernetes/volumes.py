"""A pod's volumes as folders of this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.kubernetes import sandbox
from scripts.kubernetes.environment import ConfigError, Lookup, entries, field
from scripts.kubernetes.quantities import amount

Object = dict[str, Any]
ACCOUNT = "kube-api-access"
ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where clients look for their pod's account."""
SHM_BYTES = 64 * 2**20
"""Of /dev/shm where no volume is mounted there, as container runtimes have it."""


def prepare(
    pod: Object, folder: Path, *, lookup: Lookup, account: Callable[[], dict[str, bytes]]
) -> None:
    """Make what is not there yet; raises ConfigError where a source is missing.

    account: the files of the pod's service account, `token` among them."""
    if _has_account(pod) and not (folder / ACCOUNT).exists():
        (folder / f".{ACCOUNT}").mkdir(parents=True, exist_ok=True)
        _write(folder / f".{ACCOUNT}", account(), {}, 0o600)
        (folder / f".{ACCOUNT}").rename(folder / ACCOUNT)
    for volume in pod["spec"].get("volumes", []):
        path = folder / volume["name"]
        if path.exists():
            continue
        if "emptyDir" in volume:
            path.mkdir(parents=True)
            _empty(path, volume["emptyDir"] or {})
        elif "hostPath" in volume:
            _host(volume["hostPath"])
        else:
            made = folder / f".{volume['name']}"  # whole, or not under its name
            made.mkdir(parents=True, exist_ok=True)
            _files(pod, volume, made, lookup, account)
            made.rename(path)


def binds(pod: Object, container: Object, folder: Path) -> list[Object]:
    """What the sandbox mounts: source, target, read_only."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    found = []
    for mount in container.get("volumeMounts", []):
        volume = volumes[mount["name"]]
        source = folder / mount["name"]
        if host := volume.get("hostPath"):
            source = Path(host["path"])
        if inner := mount.get("subPath"):
            source = source / inner
            if not source.exists():
                source.mkdir(parents=True)
        read_only = bool(mount.get("readOnly")) or "secret" in volume or "configMap" in volume
        found.append({"source": str(source), "target": mount["mountPath"], "read_only": read_only})
    if _has_account(pod) and all(bind["target"] != ACCOUNT_PATH for bind in found):
        source = folder / ACCOUNT
        found.append({"source": str(source), "target": ACCOUNT_PATH, "read_only": True})
    # A mount below another one comes after it.
    return sorted(found, key=lambda bind: len(str(bind["target"])))


def release(path: Path) -> None:
    """Give a volume's memory back."""
    if path.is_mount():
        sandbox.unmount(str(path))


def _empty(path: Path, source: Object) -> None:
    if source.get("medium") == "Memory":
        limit = source.get("sizeLimit")
        sandbox.mount_memory(str(path), int(amount(limit)) if limit else None)


def _has_account(pod: Object) -> bool:
    return pod["spec"].get("automountServiceAccountToken") is not False


def _host(source: Object) -> None:
    path = Path(source["path"])
    if source.get("type") == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise ConfigError(f"hostPath {path} does not exist")


def _files(
    pod: Object,
    volume: Object,
    folder: Path,
    lookup: Lookup,
    account: Callable[[], dict[str, bytes]],
) -> None:
    if "secret" in volume:
        source = volume["secret"]
        named = {"name": source["secretName"], "optional": source.get("optional")}
        _write(folder, entries("secrets", named, lookup), source, source.get("defaultMode", 0o644))
    elif "configMap" in volume:
        source = volume["configMap"]
        _write(folder, entries("configmaps", source, lookup), source, 0o644)
    elif "projected" in volume:
        for part in volume["projected"]["sources"]:
            _project(pod, folder, part, lookup, account)
    elif "downwardAPI" in volume:
        _downward(pod, folder, volume["downwardAPI"])
    else:
        kinds = ", ".join(sorted(volume.keys() - {"name"}))
        raise ConfigError(f"volume {volume['name']}: the test kubelet knows no {kinds}")


def _project(
    pod: Object, folder: Path, part: Object, lookup: Lookup, account: Callable[[], dict[str, bytes]]
) -> None:
    if "serviceAccountToken" in part:
        _write(folder, {part["serviceAccountToken"]["path"]: account()["token"]}, {}, 0o600)
    if "secret" in part:
        _write(folder, entries("secrets", part["secret"], lookup), part["secret"], 0o644)
    if "configMap" in part:
        _write(folder, entries("configmaps", part["configMap"], lookup), part["configMap"], 0o644)
    if "downwardAPI" in part:
        _downward(pod, folder, part["downwardAPI"])


def _downward(pod: Object, folder: Path, source: Object) -> None:
    for item in source.get("items", []):
        text = field(pod, item["fieldRef"]["fieldPath"], "")
        _write(folder, {item["path"]: text.encode()}, {}, 0o644)


def _write(folder: Path, values: dict[str, bytes], source: Object, mode: int) -> None:
    """Under the names that `items` gives, or else each under its key."""
    names = {item["key"]: item["path"] for item in source.get("items") or []}
    for name, value in values.items():
        if names and name not in names:
            continue
        path = folder / names.get(name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=mode)
        path.write_bytes(value)
        path.chmod(mode)
