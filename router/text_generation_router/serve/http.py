"""The HTTP side of a router: tokenizer, templates and application; it listens, and drains when it stops."""

import asyncio
import ipaddress
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Self

from aiohttp import web

from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_common.heartbeat import send_heartbeats
from text_generation_common.log import log
from text_generation_common.notify import Notifier
from text_generation_common.stop_signals import StopSignals
from text_generation_common.tracing import start_tracing
from text_generation_common.waiting import background, first_of
from text_generation_proto.addresses import join_host_port
from text_generation_proto.values import LOGPROB_PARAMETERS
from text_generation_router.api.app import create_app, create_starting_app
from text_generation_router.api.assemble import assemble
from text_generation_router.api.core.settings import Limits, Settings
from text_generation_router.api.http.keys import ApiKeys
from text_generation_router.api.table import route_table
from text_generation_router.chat.template_files import ChatTemplates, load_templates
from text_generation_router.cluster_interface import ClusterInterface
from text_generation_router.config import RouterConfig, listen_host
from text_generation_router.memory import configure_allocator, configure_collector, give_back_memory
from text_generation_router.metrics import HttpMetrics
from text_generation_router.metrics.connections import ConnectionMetrics
from text_generation_router.metrics.instruments import Registry
from text_generation_router.permits import ConcurrencyLimit
from text_generation_router.rate_limits import RateCounter
from text_generation_router.sandbox.pool import SandboxError
from text_generation_router.serve.draining import drain
from text_generation_router.serve.shards import token_limits
from text_generation_router.shards.join import ReplicaInfo
from text_generation_router.stats import Stats
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.web.connections import MAX_UNREAD_TOTAL, ConnectionLimits
from text_generation_router.web.listener import LAST_EVENTS_S, HttpServer

VERSION = version("text-generation-trtllm")

TGI_TOP_N_TOKENS, OPENAI_TOP_LOGPROBS = 5, 20
"""The default of `--max-top-n-tokens` in each dialect: its own."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The part of the router behind HTTP, in this process or in the scheduler process."""

    cluster: ClusterInterface
    permits: ConcurrencyLimit
    rates: RateCounter
    stats: Stats
    run: Callable[[], Coroutine[None, None, None]]
    """Runs the cluster until it is cancelled."""


@dataclass(frozen=True, slots=True)
class HttpSide:
    """Serves HTTP in front of a cluster, in this process or behind the scheduler process."""

    config: RouterConfig
    tokenizer: Tokenizer
    templates: ChatTemplates
    signals: StopSignals
    notifier: Notifier

    @classmethod
    async def start(cls, config: RouterConfig) -> Self:
        """Load tokenizer and templates. Raises CannotServe."""
        configure_allocator()
        signals = StopSignals()
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(config.model_path))
        templates = load_templates(config, Path(config.model_path))
        notifier = Notifier()
        notifier.show(lambda: "waiting for a shard")
        return cls(config, tokenizer, templates, signals, notifier)

    @asynccontextmanager
    async def answering_probes(self, reached: Callable[[], bool]) -> AsyncIterator[None]:
        """Answer probes while the router waits for its first shard; `reached` tells whether one has answered."""
        config = self.config
        if not config.shards:
            yield
            return
        server = self._server(create_starting_app(reached), ConnectionMetrics(Registry()))
        await _listen(server, config)
        log.info("alive, waiting for a shard", port=server.port)
        try:
            yield
        finally:
            await server.close()

    async def serve(self, model: ReplicaInfo, limits: Limits, metrics: HttpMetrics, backend: Backend) -> ExitCode:
        """Serve `model` until a stop signal. Raises CannotServe."""
        config, signals, cluster = self.config, self.signals, backend.cluster
        log.info("limits", max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens)
        settings = _settings(config, limits, backend.rates)
        if config.api_keys_file:
            in_thread = asyncio.get_running_loop().run_in_executor
            signals.on_hangup(partial(in_thread, None, _reload_keys, settings.api_keys))
        if not settings.api_keys and not ipaddress.ip_address(listen_host(config.hostname)).is_loopback:
            log.warning(
                "no API key on a public address: everyone who reaches it may use the model", hostname=config.hostname
            )
        tracer = start_tracing(config, "text-generation-inference.router", f"router-{os.getpid()}", VERSION)
        try:
            async with assemble(
                self.tokenizer, self.templates, model.grammar_kinds, cluster, backend.permits, metrics, settings
            ) as (serving, chats, prepared):
                try:
                    table = route_table(
                        serving,
                        chats,
                        backend.stats,
                        healthy=lambda: self.notifier.is_ready and cluster.ready and not cluster.stopping,
                        model=model.info,
                        templates=self.templates,
                    )
                    app = create_app(serving, table, tracer)
                except ValueError as error:  # an AIP_* path that is invalid or taken
                    raise CannotServe(str(error)) from error
                return await self._run(app, metrics, backend, prepared)
        finally:
            if tracer is not None:
                await tracer.close()

    async def _run(
        self, app: web.Application, metrics: HttpMetrics, backend: Backend, prepared: Callable[[], Awaitable[None]]
    ) -> ExitCode:
        config, signals, notifier, cluster = self.config, self.signals, self.notifier, backend.cluster
        server = self._server(app, metrics.connections)
        notifier.show(lambda: f"draining {cluster.live_requests} requests" if cluster.draining else cluster.status)
        async with background(backend.run(), send_heartbeats(notifier), give_back_memory()):
            if not config.shards:
                await first_of(cluster.opened(), signals.stop.wait())
            if signals.stop.is_set():
                return ExitCode.STOPPED
            try:
                await _listen(server, config)
                log.info("ready", url=f"http://{join_host_port(listen_host(config.hostname), server.port)}")
                configure_collector()
                await first_of(self._until_ready(cluster, prepared), signals.stop.wait())
                if not signals.stop.is_set():
                    notifier.ready()
                await signals.stop.wait()
            finally:
                cluster.stopping = True
            if config.shutdown_delay:
                log.info("not ready, still accepting", seconds=config.shutdown_delay)
                await first_of(signals.hurry.wait(), timeout_s=config.shutdown_delay)
            await drain(cluster, server.answered(), signals, notifier, config.graceful_termination_timeout)
            await first_of(server.answered(), timeout_s=LAST_EVENTS_S)
            await first_of(server.leave(), signals.hurry.wait())
            await server.close()
        log.info("stopped")
        return ExitCode.STOPPED

    def _server(self, app: web.Application, metrics: ConnectionMetrics) -> HttpServer:
        """Return a server with the limits of this process: an equal part of those of all HTTP workers."""
        config = self.config
        limits = ConnectionLimits(
            max(1, config.max_connections // config.http_workers),
            keep_alive_s=config.keep_alive_timeout,
            unread_total=MAX_UNREAD_TOTAL // config.http_workers,
        )
        return HttpServer(app, limits, metrics, shared=config.role == "http")

    async def _until_ready(self, cluster: ClusterInterface, prepared: Callable[[], Awaitable[None]]) -> None:
        """Wait until all requests can be served; most are served before. Raises CannotServe."""
        if not self.config.peers:  # a router among peers may have no shard
            await cluster.settled()
        try:
            await prepared()
        except SandboxError as error:
            raise CannotServe(str(error)) from error


def _settings(config: RouterConfig, limits: Limits, rates: RateCounter) -> Settings:
    try:
        keys = ApiKeys(config, rates)
    except ValueError as error:
        raise CannotServe(str(error)) from error
    created = int((Path(config.model_path) / "tokenizer.json").stat().st_mtime)
    return Settings(limits, config, keys, VERSION, created=created)


def _reload_keys(keys: ApiKeys) -> None:
    try:
        keys.reload()
    except ValueError as error:
        log.error("API keys not read again: the old ones stay", reason=str(error))
    else:
        log.info("API keys read again")


async def _listen(server: HttpServer, config: RouterConfig) -> None:
    host = listen_host(config.hostname)
    try:
        await server.listen(host, config.port, config.management_port)
    except OSError as error:
        ports = f"{config.port} or {config.management_port}" if config.management_port else str(config.port)
        raise CannotServe(f"cannot listen on {host}:{ports}: {error.strerror or error}") from error


def resolve_limits(config: RouterConfig, model: ReplicaInfo) -> Limits:
    """Return the limits of one request: the settings, else the limits of model and KV cache. Raises CannotServe."""
    longest, total = token_limits(config, model)
    unsupported = dict(model.unsupported)
    if config.token_logprobs == "never":
        names = [parameter.field for parameter in LOGPROB_PARAMETERS]
        unsupported |= dict.fromkeys(names, "the server runs with --token-logprobs never")

    def most_tops(default: int) -> int:
        asked = default if config.max_top_n_tokens is None else config.max_top_n_tokens
        # If the engine has none, its reason is more useful than a limit of 0.
        return asked if "top_n" in unsupported else min(asked, model.info.max_top_n_tokens)

    return Limits(
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=most_tops(TGI_TOP_N_TOKENS),
        max_top_logprobs=most_tops(OPENAI_TOP_LOGPROBS),
        max_input_tokens=longest,
        max_total_tokens=total,
        vocab_size=model.info.vocab_size,
        max_images=model.info.max_images,
        unsupported=unsupported,
        always_logprobs=config.token_logprobs == "always",
        drafts=model.info.max_tokens_per_step > 1,
        marks_turns=any(group.state for group in model.pool.further_groups),
    )
