"""etcd and kube-apiserver on loopback, RBAC on, in a folder of their own.

with reach(folder) as server:
    Client(access(server.kubeconfig))...
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from urllib3.exceptions import HTTPError

from elastic.agent import prctl
from scripts.kubernetes.assets import Assets, find
from scripts.kubernetes.client import CORE, Access, ApiError, Client, access

START_SECONDS = 120.0
"""Far more than the 4 s that it takes alone."""
STOP_SECONDS = 10.0
HOST = "127.0.0.1"
SERVICES = "127.{block}.0.0/17"
"""A server's Services; the upper half of the block is for the pods of its kubelets."""
CLAIM_PORT = 1025
"""Who has bound it at an address has claimed what begins there."""
AUDIENCE = "https://kubernetes.default.svc"


class StartError(Exception):
    """The server did not come up; the end of its log is in the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """One that answers."""

    kubeconfig: Path
    """Of an administrator."""
    folder: Path
    """Its data, keys and logs."""
    pids: tuple[int, ...]
    """etcd's and the API server's."""


@contextlib.contextmanager
def reach(folder: Path) -> Iterator[Server]:
    """The one that `KUBECONFIG` names, as it is, else one of our own; raises Unavailable."""
    if named := os.environ.get("KUBECONFIG"):
        yield Server(kubeconfig=Path(named), folder=folder, pids=())
        return
    with serve(folder, find()) as own:
        yield own


@contextlib.contextmanager
def serve(folder: Path, assets: Assets) -> Iterator[Server]:
    """Both started, ready; ended with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        client_port, peer_port, port = _free_ports(3)
        etcd = stack.enter_context(
            _running(folder / "etcd.log", _etcd(assets, folder, client_port, peer_port))
        )
        token = secrets.token_hex(16)
        (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        (folder / "tokens.csv").chmod(0o600)
        _signing_key(folder / "accounts.key")
        apiserver = stack.enter_context(
            _running(
                folder / "apiserver.log",
                _apiserver(assets, folder, client_port, port, stack.enter_context(_block())),
            )
        )
        kubeconfig = folder / "admin.kubeconfig"
        authority = folder / "certificates" / "apiserver.crt"  # it signs its own
        allowed = Access(url=f"https://{HOST}:{port}", token=token, authority=authority)
        _wait_ready(allowed, apiserver, folder / "apiserver.log")
        write_kubeconfig(kubeconfig, allowed)
        yield Server(kubeconfig=kubeconfig, folder=folder, pids=(etcd.pid, apiserver.pid))


def write_kubeconfig(path: Path, allowed: Access, *, namespace: str = "default") -> None:
    """A kubeconfig of one user with a token; readable by the owner alone."""
    cluster = {"server": allowed.url, "certificate-authority": str(allowed.authority)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": allowed.token}}],
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
        ],
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(content))


def account_token(client: Client, namespace: str, name: str, *, seconds: int = 86400) -> str:
    """A service account's token, by TokenRequest; the account must be there."""
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [AUDIENCE], "expirationSeconds": seconds},
    }
    path = f"{CORE}/namespaces/{namespace}/serviceaccounts/{name}/token"
    return str(client.create(path, request)["status"]["token"])


def account_kubeconfig(admin: Path, namespace: str, name: str, path: Path) -> None:
    """A kubeconfig with which a program acts as that service account."""
    allowed = access(admin)
    client = Client(allowed)
    token = account_token(client, namespace, name)
    client.close()
    write_kubeconfig(
        path,
        Access(url=allowed.url, token=token, authority=allowed.authority),
        namespace=namespace,
    )


def _etcd(assets: Assets, folder: Path, client_port: int, peer_port: int) -> list[str]:
    client, peer = f"http://{HOST}:{client_port}", f"http://{HOST}:{peer_port}"
    return [
        str(assets.etcd),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",  # a test's data need not outlive a power cut
    ]


def _apiserver(assets: Assets, folder: Path, etcd_port: int, port: int, block: int) -> list[str]:
    key = folder / "accounts.key"
    return [
        str(assets.apiserver),
        f"--etcd-servers=http://{HOST}:{etcd_port}",
        f"--cert-dir={folder / 'certificates'}",
        f"--bind-address={HOST}",
        f"--secure-port={port}",
        f"--service-account-issuer={AUDIENCE}",
        f"--api-audiences={AUDIENCE}",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        f"--service-cluster-ip-range={SERVICES.format(block=block)}",
        # Its controller makes tokens' secrets, and none runs here: the kubelet gives tokens out.
        "--disable-admission-plugins=ServiceAccount",
        "--max-requests-inflight=0",  # no throttling of a test
        "--max-mutating-requests-inflight=0",
        "--enable-priority-and-fairness=false",
    ]


def _signing_key(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has now; all are held until the last is found."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def _block() -> Iterator[int]:
    """A second number of 127.*.*.* that no other server on this machine has."""
    for number in range(64, 255):
        with socket.socket() as claim:
            try:
                claim.bind((f"127.{number}.0.1", CLAIM_PORT))
            except OSError:
                continue
            yield number
            return
    raise StartError("190 API servers run on this machine already")


@contextlib.contextmanager
def _running(log: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
            # A test run that is killed leaves no server; noqa: it is one call of libc's.
            preexec_fn=prctl.set_pdeathsig,  # noqa: PLW1509
        )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(allowed: Access, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until /readyz says yes and the namespace `default` is there."""
    deadline = time.monotonic() + START_SECONDS
    while not _ready(allowed):
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(errors="replace").splitlines()[-5:]
            raise StartError(f"kube-apiserver did not start: {' | '.join(lines)}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


def _ready(allowed: Access) -> bool:
    if not (allowed.authority and allowed.authority.is_file()):
        return False
    try:
        client = Client(allowed)
        try:
            client.get(f"{CORE}/namespaces/default")
        finally:
            client.close()
    except (ApiError, OSError, HTTPError):
        return False
    return True
