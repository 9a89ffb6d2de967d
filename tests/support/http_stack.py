"""The whole server in one process, over real sockets: HTTP API, scheduler, gRPC, echo shard.

Only the processes are missing; nothing is mocked. `serve` yields the parts, so that a test can look at what is held.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest_asyncio
from aiohttp import web
from aiohttp.typedefs import Handler
from api_settings import api_settings
from checked_echo import CheckedEcho
from metric_samples import exposition
from multidict import CIMultiDictProxy
from shard_server import running, serve_engine

from text_generation_common.waiting import background
from text_generation_proto.values import WarmUpLimits
from text_generation_router.api.app import create_app
from text_generation_router.api.assemble import assemble
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.table import route_table
from text_generation_router.chat.template_files import ChatTemplates
from text_generation_router.cluster_interface import ClusterInterface
from text_generation_router.discovery.source import StaticSource
from text_generation_router.metrics import Metrics
from text_generation_router.metrics.connections import ConnectionMetrics
from text_generation_router.metrics.instruments import Registry
from text_generation_router.permits import ConcurrencyLimit, Permits
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.join import join
from text_generation_router.stats import OwnStats
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.web.connections import ConnectionLimits
from text_generation_router.web.listener import HttpServer
from text_generation_router.worker_link.columns import WorkerDelivery
from text_generation_router.worker_link.link import MAX_UNREAD_BYTES
from text_generation_router.worker_link.remote_cluster import RemoteCluster
from text_generation_router.worker_link.remote_limits import RemotePermits
from text_generation_router.worker_link.server import WorkerLinkServer
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine

LIMITS = Limits(max_best_of=4, max_stop_sequences=4, max_top_n_tokens=5, max_input_tokens=1024, max_total_tokens=2048)


class Reply(NamedTuple):
    """A response: its JSON, or its text."""

    status: int
    body: Any
    headers: CIMultiDictProxy[str]


@dataclass(frozen=True, slots=True)
class Stack:
    """A running server and its parts."""

    port: int
    client: aiohttp.ClientSession
    """A client session with the server."""
    permits: Permits
    metrics: Metrics
    scheduler: Scheduler
    engine: Engine
    tokenizer: Tokenizer
    cluster: Cluster
    stop_shard: Callable[[], None]
    seen: ClusterInterface
    """The cluster as HTTP sees it: another one than `cluster` if the server is linked."""
    link_server: WorkerLinkServer | None
    """The scheduler's end of the link, if the server is linked."""
    socket: Path
    """The socket of that."""

    async def ask(
        self, path: str, body: object = None, headers: dict[str, str] | None = None, method: str = ""
    ) -> Reply:
        """Return the response to a body, or to GET without one."""
        method = method or ("GET" if body is None else "POST")
        async with self.client.request(method, path, json=body, headers=headers) as response:
            is_json = response.content_type == "application/json"
            return Reply(response.status, await (response.json() if is_json else response.text()), response.headers)

    async def generate(self, inputs: str, **parameters: object) -> dict[str, Any]:
        """Return the reply of /generate; its status must be 200."""
        reply = await self.ask("/generate", {"inputs": inputs, "parameters": parameters})
        assert reply.status == 200, reply
        generated: dict[str, Any] = reply.body
        return generated

    def counted(self, series: str) -> int:
        """Return the value of a counter, `name{label="value"}`; 0 if it is not exposed."""
        return int(self.exposed(f"{series} ").get(series, 0))

    def exposed(self, *beginnings: str) -> dict[str, float]:
        """Return the values of the series that begin with one of these."""
        lines = exposition(self.metrics.registry).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(beginnings))
        return {name: float(value) for name, value in pairs}

    def small_window(self) -> socket.socket:
        """Return a connection whose client's system takes 4 kB ahead of it."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self.port))
        return connection

    async def assert_empty(self) -> None:
        """Serve one request; after it no permit, slot or KV block may be in use."""
        await until(lambda: self.permits.in_use == 0)
        await self.generate("Are you there?", max_new_tokens=1)
        await until(lambda: self.engine.running == 0 and self.permits.in_use == 0)
        stats = self.scheduler.stats()
        assert (stats.waiting, stats.running, stats.kv_usage) == (0, 0, 0)
        assert self.engine.used_blocks == 0


def request_bytes(route: str, body: Any, version: str = "1.1") -> bytes:  # noqa: ANN401 - any JSON value
    """Return a POST request."""
    payload = json.dumps(body).encode()
    head = f"POST {route} HTTP/{version}\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload


async def until(holds: Callable[[], bool]) -> None:
    """Run the event loop until the condition holds."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the resources in use have no event to wait for
            await asyncio.sleep(0)


@cache
def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@asynccontextmanager
async def serve(
    model: Path,
    *,
    limits: Limits = LIMITS,
    max_concurrent_requests: int = 128,
    max_batch_size: int = 64,
    healthy: Callable[[], bool] = lambda: True,
    settings: dict[str, Any] | None = None,
    pool_tokens: int = 0,
    chats: bool = True,
    chat_template: str | None = None,
    tool_call_parser: str = "auto",
    reasoning: bool = False,
    grammars: bool = False,
    policy: dict[str, Any] | None = None,
    connections: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - immutable
    build: Callable[[ShardConfig], Engine] = CheckedEcho.build,
    linked: bool = False,
    max_unread_bytes: int = MAX_UNREAD_BYTES,
    **echo: float,
) -> AsyncIterator[Stack]:
    """Serve the tokenizer of `model` with an engine that `build` makes.

    `settings`: fields of RouterConfig or Settings; `policy`: fields of Policy; `echo`: fields of the ShardConfig;
    `pool_tokens`: size of the KV cache, 0: the engine's own.

    `linked`: HTTP and scheduling are linked by a Unix socket, as those of an HTTP worker are; the scheduler's end cuts off
    one that does not read beyond `max_unread_bytes`.

    Without `chats` the model has no chat template, and no workers that render it are started.

    With `grammars` the echo engine follows them, and workers are started that compile them.
    """
    tokenizer = load_tokenizer(model)
    config = ShardConfig(engine="echo", model_path=str(model) if grammars else "", **echo)
    engine = build(config)
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix://{folder}/shard"
        async with serve_engine(engine, address, config=config) as shard:
            warm_up = WarmUpLimits(max_batch_total_tokens=pool_tokens)
            joined = await join(shard.client, warm_up, address, timeout=20)
            limits = replace(limits, unsupported=joined.unsupported)
            scheduler = Scheduler(
                Policy(**{"max_batch_prefill_tokens": 4096, "max_batch_size": max_batch_size, **(policy or {})}),
                replicas=0,
            )
            metrics = Metrics(
                max_input_tokens=limits.max_input_tokens,
                max_total_tokens=limits.max_total_tokens,
                scheduler=scheduler,
            )
            delivery = WorkerDelivery() if linked else None
            cluster: Cluster[Any] = Cluster(scheduler, metrics.steps, delivery=delivery)
            metrics.add_shards(cluster, lambda: len(cluster.members))
            stats = OwnStats(metrics, cluster)
            templates = (
                ChatTemplates.load(model, override=chat_template) if chats else ChatTemplates({}, {}, frozenset())
            )
            permits = Permits(max_concurrent_requests, partial(scheduler.estimated_wait, for_permit=True))
            link_server = (
                None if delivery is None else WorkerLinkServer(cluster, delivery, permits, joined, max_unread_bytes)
            )
            config = {
                "model_id": "echo",
                "model_path": str(model),
                "disable_grammar_support": not grammars,
                "tool_call_parser": tool_call_parser,
                "split_reasoning": reasoning,
            }
            async with (
                running(cluster, partial(cluster.run, StaticSource([address]).members(), {address: joined}, warm_up)),
                background(stats.run()),
                _linked(link_server, Path(folder) / "link", cluster, permits) as (seen, seen_permits),
                assemble(
                    tokenizer,
                    templates,
                    joined.grammar_kinds,
                    seen,
                    seen_permits,
                    metrics,
                    api_settings(limits, **(config | (settings or {}))),
                ) as (serving, chats, _),
                listening(
                    create_app(
                        serving,
                        route_table(serving, chats, stats, healthy=healthy, model=joined.info, templates=templates),
                    ),
                    metrics.connections,
                    connections,
                ) as server,
                aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
            ):
                yield Stack(
                    server.port,
                    session,
                    permits,
                    metrics,
                    scheduler,
                    engine,
                    tokenizer,
                    cluster,
                    shard.end_session,
                    seen,
                    link_server,
                    Path(folder) / "link",
                )


def served(**options: Any) -> Any:  # noqa: ANN401 - a fixture
    """Return a fixture: the server with these options of `serve`, for all tests of a module."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def stack(demo_model: Path) -> AsyncIterator[Stack]:
        async with serve(demo_model, **options) as running:
            yield running

    return stack


@asynccontextmanager
async def _linked(
    link_server: WorkerLinkServer | None, path: Path, cluster: Cluster[Any], permits: Permits
) -> AsyncIterator[tuple[ClusterInterface, ConcurrencyLimit]]:
    """Put a link in between, if there is to be one."""
    if link_server is None:
        yield cluster, permits
        return
    async with link_server.listening(path), worker_of(path) as remote:
        yield remote, RemotePermits(permits.limit, remote.link)


@asynccontextmanager
async def worker_of(path: Path, number: int = 0) -> AsyncIterator[RemoteCluster]:
    """Be an HTTP worker of the scheduler that listens at `path`."""
    remote = RemoteCluster(path, number, {})
    await remote.link.joined()
    async with running(remote, remote.run):
        yield remote


@asynccontextmanager
async def answering(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[HttpServer]:
    """Serve GET / with a handler."""
    app = web.Application()
    app.router.add_get("/", handler)
    async with listening(app, ConnectionMetrics(Registry()), ConnectionLimits(), host) as server:
        yield server


@asynccontextmanager
async def listening(
    app: web.Application, metrics: ConnectionMetrics, limits: ConnectionLimits, host: str = "127.0.0.1"
) -> AsyncIterator[HttpServer]:
    """Serve an application on a free port."""
    server = HttpServer(app, limits, metrics)
    await server.listen(host, 0)
    try:
        yield server
    finally:
        await server.close()
