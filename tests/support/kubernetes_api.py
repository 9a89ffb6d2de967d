"""A Kubernetes API server for EndpointSlices: list and watch with resource versions, and the faults of real ones.

Each change gets the next resource version. A watch from a version before `compact` is answered with 410 Gone, as an ERROR
event; a wrong token with 401. `down` refuses requests and drops watches, `silent` holds watches without their events.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from text_generation_router.discovery.kubernetes import KubernetesApi

PER_SLICE = 10
"""Endpoints of a slice, so that a service has several."""


@dataclass
class FakeKubernetes:
    """The state of the server, and what it does wrong."""

    token: str = "first"
    down: bool = False
    silent: bool = False
    api: KubernetesApi = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    """Requests: list, watch, 401, 410, 503."""
    _slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    _events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _version: int = 1
    _oldest: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _watches: set[asyncio.Task[Any]] = field(default_factory=set)

    def serve(self, addresses: Iterable[str], *, ready: bool = True, service: str = "shards") -> None:
        """Let the service have the endpoints `addresses`, host:port each, in slices by port."""
        by_name: dict[str, dict[str, Any]] = {}
        for number, address in enumerate(sorted(addresses)):
            host, _, port = address.rpartition(":")
            name = f"{service}-{port}-{number // PER_SLICE}"
            slice_ = by_name.setdefault(name, self._slice(name, service, int(port)))
            slice_["endpoints"].append({"addresses": [host], "conditions": {"ready": ready}})
        mine = {name for name, old in self._slices.items() if old["metadata"]["labels"][SERVICE] == service}
        for name in mine - by_name.keys():
            self._record("DELETED", self._slices.pop(name))
        for name, slice_ in by_name.items():
            old = self._slices.get(name)
            if old is None or old["endpoints"] != slice_["endpoints"]:
                self._slices[name] = slice_
                self._record("MODIFIED" if old else "ADDED", slice_)

    def _slice(self, name: str, service: str, port: int) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "labels": {SERVICE: service}},
            "addressType": "IPv4",
            "ports": [{"name": "grpc", "port": port}],
            "endpoints": [],
        }

    def _record(self, kind: str, slice_: dict[str, Any]) -> None:
        self._version += 1
        self._events.append((self._version, {"type": kind, "object": json.loads(json.dumps(slice_))}))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def compact(self) -> None:
        """Forget the events so far, and let the next version be one that no watch can start from."""
        self._version += 1
        self._oldest = self._version
        self._events.clear()

    def drop_watches(self) -> None:
        """Break the connections of all watches."""
        for task in self._watches:
            task.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.down:
            self.counts["503"] += 1
            raise web.HTTPServiceUnavailable
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            self.counts["401"] += 1
            raise web.HTTPUnauthorized
        key, _, service = request.query["labelSelector"].partition("=")
        assert key == SERVICE
        if "watch" in request.query:
            return await self._watch(request, service)
        self.counts["list"] += 1
        items = [each for each in self._slices.values() if each["metadata"]["labels"][SERVICE] == service]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items or None})

    async def _watch(self, request: web.Request, service: str) -> web.StreamResponse:
        self.counts["watch"] += 1
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        response = web.StreamResponse()
        await response.prepare(request)
        version = int(request.query["resourceVersion"])
        try:
            while True:
                changed = self._changed
                if version < self._oldest:
                    self.counts["410"] += 1
                    await _send(response, {"type": "ERROR", "object": {"kind": "Status", "code": 410}})
                    return response
                for at, event in [] if self.silent else list(self._events):
                    if at > version:
                        version = at
                        if event["object"]["metadata"]["labels"][SERVICE] == service:
                            await _send(response, event)
                await changed.wait()
        finally:
            self._watches.discard(task)


SERVICE = "kubernetes.io/service-name"


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(json.dumps(event).encode() + b"\n")


@asynccontextmanager
async def fake_kubernetes(folder: Path, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeKubernetes]:
    """Serve the namespace `default`; the token is in a file in `folder`."""
    fake = FakeKubernetes()
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", fake.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    token = folder / "token"
    token.write_text(fake.token)
    fake.api = KubernetesApi(f"http{'s' if tls else ''}://127.0.0.1:{port}", token, folder / "ca.pem" if tls else None)
    try:
        yield fake
    finally:
        fake.drop_watches()
        await runner.cleanup()
