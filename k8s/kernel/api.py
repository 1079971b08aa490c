"""Raw calls to the API server: JSON in, JSON out, each with a time-out, errors in the server's words.

The official client gives the connection: kubeconfig with its login plugins, a pod's service account
whose token is read again each minute, TLS. Its models are not used: a pod as plain JSON takes a tenth
of the memory, and fields that this version of the client does not know survive.
"""

import asyncio
import contextlib
import importlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Self
from urllib.parse import urlencode

from elastic.k8s.kernel import connection
from elastic.k8s.kernel.connection import Connection
from elastic.k8s.kernel.errors import (
    NoCluster,
    Unauthorized,
    Unreachable,
    from_answer,
)
from elastic.k8s.kernel.pacing import Pace
from elastic.k8s.kernel.resources import Resource

Json = dict[str, Any]

JSON = "application/json"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml; charset=utf-8"  # with the parameter the client sends bytes as they are

TIMEOUT = 30.0
"""Seconds for a call that says nothing else; the server itself gives up after 60."""
CONNECT = 10.0
"""Seconds for a connection."""
SILENCE = 70.0
"""Seconds without a byte after which a watch is taken for dead: bookmarks come each minute."""


class Api:
    """One client of one cluster, for one event loop."""

    def __init__(
        self,
        found: Connection,
        *,
        pace: Pace | None = None,
        agent: str = "elasticctl",
    ) -> None:
        """agent: what the server's audit log calls us, and the field manager of plain writes."""
        self.namespace = found.namespace
        self.source = found.source
        self._agent = agent
        self._pace = pace or Pace()
        self._again: tuple[str | None, str | None] | None = None
        self._client = _client(found)

    @classmethod
    async def connect(
        cls,
        *,
        kubeconfig: str | None = None,
        context: str | None = None,
        pace: Pace | None = None,
        agent: str = "elasticctl",
    ) -> Self:
        """A client of the cluster that `connection.find` finds; raises NoCluster. Nothing is sent."""
        found = await connection.find(kubeconfig, context)
        api = cls(found, pace=pace, agent=agent)
        api._again = kubeconfig, context
        return api

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    # --- reading ---------------------------------------------------------------------------------

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """One object."""
        return await self.call("GET", resource.path(namespace, name))

    async def page(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        selector: str = "",
        fields: str = "",
        limit: int = 250,
        token: str = "",
    ) -> Json:
        """One page of a list, as the server has it now; token: where the last page ended."""
        query = _chosen(selector, fields) | {"limit": str(limit)}
        if token:
            query["continue"] = token
        return await self.call("GET", resource.path(namespace), query=query)

    async def all(
        self, resource: Resource, namespace: str = "", *, selector: str = "", fields: str = ""
    ) -> list[Json]:
        """A whole list; Gone where it changed too much between two pages."""
        found: list[Json] = []
        token = ""
        while True:
            page = await self.page(
                resource, namespace, selector=selector, fields=fields, token=token
            )
            found += page.get("items") or ()
            token = page["metadata"].get("continue") or ""
            if not token:
                return found

    async def watch(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        version: str,
        selector: str = "",
        fields: str = "",
        seconds: float = 300.0,
        silence: float = SILENCE,
    ) -> AsyncIterator[Json]:
        """Events after `version`, until the server ends it (after `seconds`). A watch that breaks off
        or is silent for too long raises Unreachable; close it (`contextlib.aclosing`) when leaving
        it early."""
        query = _chosen(selector, fields) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(round(seconds)),
        }
        limits = {"total": None, "sock_connect": CONNECT, "sock_read": silence}
        async with self._answer("GET", resource.path(namespace), query, limits=limits) as answer:
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    yield _event(line)

    async def logs(
        self, namespace: str, pod: str, *, container: str = "", lines: int | None = None
    ) -> str:
        """What a pod's container wrote; lines: the last so many alone."""
        query = {"container": container} if container else {}
        if lines is not None:
            query["tailLines"] = str(lines)
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        return (await self._bytes("GET", path, query)).decode(errors="replace")

    # --- writing ---------------------------------------------------------------------------------

    async def create(
        self, resource: Resource, namespace: str, body: Json, *, dry_run: bool = False
    ) -> Json:
        """Create an object; dry_run: everything but the writing, admission included."""
        query = {"fieldManager": self._agent, **_dry(dry_run)}
        return await self.call("POST", resource.path(namespace), query=query, body=body)

    async def apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Json,
        *,
        manager: str,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Json:
        """Server-side apply: the fields of `body` become those of `manager`, from whoever had them;
        what that manager applied before and leaves out now goes. `metadata.uid` in the body makes it
        fail (Conflict) on an object of the same name that is another."""
        query = {"fieldManager": manager, "force": "true", **_dry(dry_run)}
        named = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            **body,
            "metadata": {**body.get("metadata", {}), "name": name},
        }
        path = resource.path(namespace, name, subresource)
        return await self.call("PATCH", path, query=query, body=_yaml(named), content=APPLY)

    async def merge(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Json,
        *,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Json:
        """Merge patch; null takes a field away. `metadata.resourceVersion` in it makes it conditional."""
        path = resource.path(namespace, name, subresource)
        query = {"fieldManager": self._agent, **_dry(dry_run)}
        return await self.call("PATCH", path, query=query, body=body, content=MERGE)

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        grace: int | None = None,
        propagation: str = "Background",
        dry_run: bool = False,
    ) -> Json:
        """Delete one object; uid: that one alone, Conflict where the name is another's by now; grace:
        seconds in place of the object's own; 0 takes a pod away without asking its node."""
        options: Json = {"propagationPolicy": propagation}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if dry_run:  # of what has a body the server does not read the query
            options["dryRun"] = ["All"]
        return await self.call("DELETE", resource.path(namespace, name), body=options)

    # --- the wire --------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | bytes | None = None,
        content: str = JSON,
        accept: str = JSON,
        timeout: float = TIMEOUT,
        urgent: bool = False,
    ) -> Json:
        """One call, its answer's JSON; urgent: it does not wait for its turn. Raises ApiError."""
        data = await self._bytes(
            method,
            path,
            query or {},
            body=body,
            content=content,
            accept=accept,
            timeout=timeout,
            urgent=urgent,
        )
        try:
            answer = json.loads(data)
        except ValueError as error:
            raise Unreachable(f"{method} {path}: the answer is no JSON") from error
        return answer if isinstance(answer, dict) else {"items": answer}

    async def _bytes(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: Json | bytes | None = None,
        content: str = JSON,
        accept: str = JSON,
        timeout: float = TIMEOUT,
        urgent: bool = False,
    ) -> bytes:
        limits = {"total": timeout, "sock_connect": CONNECT}
        for attempt in (1, 2):
            if not urgent:
                await self._pace.turn()
            try:
                async with self._answer(
                    method, path, query, body=body, content=content, accept=accept, limits=limits
                ) as answer:
                    return bytes(await answer.read())
            except Unauthorized:
                if attempt == 2 or not await self._log_in():
                    raise
        raise AssertionError("the loop returns or raises")

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        limits: Mapping[str, float | None],
        body: Json | bytes | None = None,
        content: str = JSON,
        accept: str = JSON,
    ) -> AsyncIterator[Any]:
        """The answer to a call, its body not read yet (aiohttp.ClientResponse)."""
        aiohttp = importlib.import_module("aiohttp")
        url = self._client.configuration.host + path
        url += f"?{urlencode(query)}" if query else ""
        headers = {"Accept": accept, "Content-Type": content, "User-Agent": self._agent}
        try:
            await self._client.update_params_for_auth(
                headers, {}, ["BearerToken"], path, method, body
            )
            answer = await self._client.call_api(
                method, url, headers, body, _request_timeout=aiohttp.ClientTimeout(**limits)
            )
            async with answer.response:
                if answer.status >= 400:
                    raise from_answer(answer.status, await answer.read(), answer.headers)
                with _cut_off(answer.response):
                    yield answer.response
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            what = str(error) or "no answer in time"
            raise Unreachable(f"the API server ({self.source}) did not answer: {what}") from error

    async def _log_in(self) -> bool:
        """Read the token again: its file was renewed, or a login plugin's is over."""
        if self._again is None:
            return False
        try:
            found = await connection.find(*self._again)
        except NoCluster:
            return False
        self._client.configuration.api_key = found.configuration.api_key
        return True


@contextlib.contextmanager
def _cut_off(response: Any) -> Iterator[None]:
    """Who leaves an answer before its end leaves at once: a farewell by TLS would outlive the event loop."""
    try:
        yield
    except BaseException:
        connection = response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        raise


def _client(found: Connection) -> Any:
    return importlib.import_module("kubernetes.aio.client").ApiClient(found.configuration)


def _yaml(body: Json) -> bytes:
    """JSON that is YAML, too: there half of a UTF-16 pair (\\ud83c) is no character, as which JSON writes what is
    beyond 16 bits, and some characters may not stand as they are. Half of a pair alone is shown as none."""

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        if 0xD800 <= code < 0xE000:
            code = 0xFFFD
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return re.sub(r"[^\x00-\x7e]", escaped, json.dumps(body, ensure_ascii=False)).encode()


def _event(line: bytes) -> Json:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise Unreachable("the watch broke off inside an event") from error
    return event if isinstance(event, dict) else {}


def _chosen(selector: str, fields: str) -> dict[str, str]:
    query = {"labelSelector": selector, "fieldSelector": fields}
    return {name: value for name, value in query.items() if value}


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}
