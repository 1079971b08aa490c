"""Plain calls to an API server, for the test kubelet and the tests: JSON in, JSON out."""

import base64
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml

Object = dict[str, Any]
Query = dict[str, str | int | bool]
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
CORE = "/api/v1"


class ApiError(Exception):
    """The server refused; its code and its own words."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Where a server is and who asks."""

    url: str
    """https://host:port."""
    token: str
    """Bearer token."""
    authority: Path | None
    """PEM file that its certificate is checked against; None: the system's."""


def access(kubeconfig: Path) -> Access:
    """Of the current context, where that has a token."""
    config = yaml.safe_load(kubeconfig.read_text())
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    if "token" not in user:
        raise ValueError(f"{kubeconfig}: user {context['user']} has no token")
    authority = cluster.get("certificate-authority")
    if authority is None and "certificate-authority-data" in cluster:
        made = kubeconfig.with_suffix(".ca.crt")
        made.write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
        authority = str(made)
    return Access(
        url=cluster["server"],
        token=user["token"],
        authority=Path(authority) if authority else None,
    )


def _named(entries: list[Object], name: str) -> Object:
    return next(entry for entry in entries if entry["name"] == name)


class Client:
    """Calls as one user; for many threads."""

    def __init__(self, allowed: Access, *, connections: int = 32) -> None:
        self.access = allowed
        context = ssl.create_default_context(
            cafile=str(allowed.authority) if allowed.authority else None
        )
        self._pool = urllib3.PoolManager(
            maxsize=connections, ssl_context=context, retries=False, timeout=30.0
        )

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        kind: str = "application/json",
        accept: str = "application/json",
        query: Query | None = None,
    ) -> Object:
        """One call; raises ApiError where it is refused, urllib3's HTTPError where it fails."""
        response = self._pool.request(
            method,
            self._address(path, query or {}),
            body=None if body is None else json.dumps(body).encode(),
            headers={**self._headers(), "Content-Type": kind, "Accept": accept},
        )
        if response.status >= 400:
            raise ApiError(response.status, _message(response.data))
        found: Object = json.loads(response.data or b"{}")
        return found

    def get(self, path: str, **query: str | int | bool) -> Object:
        """Read an object or a list."""
        return self.call("GET", path, query=query)

    def create(self, path: str, body: Object) -> Object:
        """Post to a list's path."""
        return self.call("POST", path, body)

    def make(self, path: str, body: Object) -> Object:
        """`create`; where one of that name is there, it is merged into it."""
        try:
            return self.create(path, body)
        except ApiError as error:
            if error.code != 409:
                raise
        return self.merge(f"{path}/{body['metadata']['name']}", body)

    def merge(self, path: str, body: object) -> Object:
        """A merge patch: None removes a field."""
        return self.call("PATCH", path, body, kind=MERGE)

    def apply(self, path: str, body: Object, *, manager: str = "tests") -> Object:
        """Server-side apply."""
        query: Query = {"fieldManager": manager, "force": True}
        return self.call("PATCH", path, body, kind=APPLY, query=query)

    def delete(self, path: str, **options: object) -> None:
        """Gone already is as well; options: of DeleteOptions, such as gracePeriodSeconds."""
        try:
            self.call("DELETE", path, options or None)
        except ApiError as error:
            if error.code != 404:
                raise

    def watch(self, path: str, **query: str | int | bool) -> Iterator[Object]:
        """Events until the server ends it, `timeoutSeconds` at the latest; bookmarks are dropped."""
        query = {"watch": True, "timeoutSeconds": 300, **query}
        response = self._pool.request(
            "GET",
            self._address(path, query),
            headers=self._headers(),
            preload_content=False,
            timeout=urllib3.Timeout(connect=10, read=330),
        )
        try:
            if response.status >= 400:
                raise ApiError(response.status, _message(response.data))
            rest = b""
            for chunk in response.stream(2**16):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from map(json.loads, lines)
        finally:
            response.close()

    def close(self) -> None:
        """End the idle connections."""
        self._pool.clear()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.access.token}"}

    def _address(self, path: str, query: Query) -> str:
        words = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in query.items()}
        return f"{self.access.url}{path}" + (f"?{urlencode(words)}" if words else "")


def _message(body: bytes) -> str:
    """Of a refusal: a Status, or plain words where there is no such path."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()
