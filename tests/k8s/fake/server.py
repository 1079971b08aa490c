"""An API server that fails on request: a store and its faults behind HTTP. It knows of objects, versions
and watches what the kernel relies on; schemas, roles and admission are tested on a real one.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web

from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.connection import Connection
from elastic.k8s.kernel.pacing import Pace
from tests.k8s.fake.faults import Fault, Faults, WatchFault
from tests.k8s.fake.store import Json, Place, Refusal, Store


@dataclass(kw_only=True)
class Server:
    """A running fake server."""

    port: int = 0
    store: Store = field(default_factory=Store)
    faults: Faults = field(default_factory=Faults)
    asked: list[str] = field(default_factory=list)
    """Every call: method, path and query."""
    tokens: list[str | None] = field(default_factory=list)
    """What each call said of who asks."""
    page: int = 0
    """Largest page of a list; 0: as asked for."""
    bookmark: float = 0.05
    """Seconds between bookmarks of a silent watch."""
    silent: set[str] = field(default_factory=set)
    """Collections whose watches are on, and tell nothing."""
    vanishing: set[Place] = field(default_factory=set)
    """Objects that are deleted once they have been read."""
    watches: set[asyncio.Transport] = field(default_factory=set)
    """Connections of the watches that are on."""
    _lists: dict[str, list[Json]] = field(default_factory=dict)
    """Lists that were begun: all of their pages are of one moment."""

    def api(self, *, qps: float = 1e6, burst: int = 1000) -> Api:
        from kubernetes.aio.client import Configuration  # slow to import

        configuration = Configuration(host=f"http://127.0.0.1:{self.port}")
        found = Connection(configuration=configuration, namespace="default", source="fake")
        return Api(found, pace=Pace(qps, burst))

    # --- calls -----------------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path_qs}")
        self.tokens.append(request.headers.get("Authorization"))
        if request.query.get("watch") == "true":
            return await self._watch(request)
        if self.faults.late:
            await asyncio.sleep(self.faults.late.popleft())
        fault = self.faults.of_call(request.method)
        if fault is not None and not fault.after:
            return _failed(request, fault)
        try:
            answer = await self._call(request)
        except Refusal as error:
            return _status(error.status, error.reason, str(error))
        if fault is not None:
            return _failed(request, fault)
        return web.json_response(answer)

    async def _call(self, request: web.Request) -> Json:
        collection, namespace, name = _place(request.path)
        body = await request.json() if request.can_read_body else {}
        place: Place = (collection, namespace, name or body.get("metadata", {}).get("name", ""))
        store = self.store
        if request.method == "GET":
            found = store.get(place) if name else self._list(request)
            if place in self.vanishing:
                self.vanishing.discard(place)
                await store.delete(place, "")
            return found
        if request.query.get("dryRun"):
            return body
        if request.method == "POST":
            return await store.create(place, body)
        if request.method == "PUT":
            return await store.replace(place, body)
        if request.method == "DELETE":
            return await store.delete(place, body.get("preconditions", {}).get("uid", ""))
        if request.content_type == "application/apply-patch+yaml" and place not in store.items:
            if "uid" in body["metadata"]:
                raise Refusal(409, "Conflict", "uid mismatch: the object does not exist")
            return await store.create(place, body)
        return await store.patch(place, body)

    def _list(self, request: web.Request) -> Json:
        collection, namespace, _ = _place(request.path)
        limit = self.page or int(request.query.get("limit", "500"))
        version, _, at = request.query.get("continue", "").partition(":")
        if not version:
            version, at = str(self.store.version), "0"
            selector = request.query.get("labelSelector", "")
            self._lists[version] = self.store.chosen(collection, namespace, selector)
        elif int(version) < self.store.floor:
            raise Refusal(410, "Expired", "The provided continue parameter is too old")
        found, start = self._lists[version], int(at)
        metadata = {"resourceVersion": version}
        if start + limit < len(found):
            metadata["continue"] = f"{version}:{start + limit}"
        return {"metadata": metadata, "items": found[start : start + limit]}

    # --- watches ---------------------------------------------------------------------------------

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        fault = self.faults.of_watch()
        if version < self.store.floor:
            return _status(410, "Expired", f"too old resource version: {version}")
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        transport = request.transport
        assert transport is not None
        self.watches.add(transport)
        try:
            with contextlib.suppress(ConnectionError):
                await self._events(request, answer, version, fault)
        finally:
            self.watches.discard(transport)
        return answer

    def break_watches(self) -> None:
        """Break all of them off at once."""
        for transport in self.watches:
            transport.abort()

    async def _events(
        self,
        request: web.Request,
        answer: web.StreamResponse,
        version: int,
        fault: WatchFault | None,
    ) -> None:
        collection, namespace, _ = _place(request.path)
        selector, sent = request.query.get("labelSelector", ""), 0
        while True:
            if collection in self.silent:
                await asyncio.sleep(self.bookmark)
                continue
            if version < self.store.floor:  # there were events that it has not had
                fault = WatchFault(after=0, kind="gone")
                return await _end(request, answer, fault, b"")
            for event in self.store.since(collection, namespace, selector, version):
                if fault is not None and sent >= fault.after:
                    return await _end(request, answer, fault, _line(event.kind, event.item))
                await answer.write(_line(event.kind, event.item))
                sent, version = sent + 1, event.version
            if fault is not None and sent >= fault.after:
                return await _end(request, answer, fault, b'{"type": "ADDED", "obj')
            version = max(version, self.store.version)
            try:
                async with asyncio.timeout(self.bookmark), self.store.changed:
                    while self.store.version <= version:
                        await self.store.changed.wait()
            except TimeoutError:
                item = {"metadata": {"resourceVersion": str(version)}}
                await answer.write(_line("BOOKMARK", item))


async def _end(
    request: web.Request, answer: web.StreamResponse, fault: WatchFault, line: bytes
) -> None:
    assert request.transport is not None
    if fault.kind == "drop":
        request.transport.abort()
    elif fault.kind == "torn":
        await answer.write(line[: len(line) // 2])
        request.transport.close()
    elif fault.kind in ("gone", "error"):
        code = 410 if fault.kind == "gone" else 500
        await answer.write(
            _line("ERROR", {"kind": "Status", "code": code, "message": f"injected {code}"})
        )
    elif fault.kind == "silence":
        while not request.transport.is_closing():
            await asyncio.sleep(0.01)


def _line(kind: str, item: Json) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def _place(path: str) -> tuple[str, str, str]:
    """Collection, namespace and name of a path; a subresource is taken for the object itself."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if not rest:
        raise Refusal(404, "NotFound", "no such group is served")
    group = "/".join(parts[1 : len(parts) - len(rest)])
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    return f"{group}/{rest[0]}", namespace, rest[1] if len(rest) > 1 else ""


def _failed(request: web.Request, fault: Fault) -> web.StreamResponse:
    if fault.status == 0:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()
    answer = _status(fault.status, _REASONS.get(fault.status, "InternalError"), "injected")
    if fault.retry_after is not None:
        answer.headers["Retry-After"] = str(fault.retry_after)
    return answer


_REASONS = {401: "Unauthorized", 403: "Forbidden", 409: "Conflict", 429: "TooManyRequests"}


def _status(code: int, reason: str, message: str) -> web.Response:
    told = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return web.json_response(told, status=code)


@contextlib.asynccontextmanager
async def serve(**settings: float) -> AsyncIterator[Server]:
    """A fake server on a socket of its own, for the length of a `with`."""
    server = Server(**settings)  # type: ignore[arg-type]
    application = web.Application(client_max_size=1 << 24)
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()
