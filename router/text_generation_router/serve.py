"""The composition root of the router: connect to the shards, warm them up, serve HTTP, drain."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from pathlib import Path

import structlog
from aiohttp import web

from text_generation_proto.exit_codes import CannotServe, ExitCode
from text_generation_proto.heartbeat import send_heartbeats
from text_generation_proto.notify import Notifier
from text_generation_proto.stop_signals import StopSignals
from text_generation_proto.tracing import start_tracing
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import LOGPROB_PARAMETERS, WarmUpLimits
from text_generation_router.api.app import create_app
from text_generation_router.api.assemble import assemble
from text_generation_router.api.core.admission import Permits
from text_generation_router.api.core.settings import Limits, Settings
from text_generation_router.api.http.connections import ConnectionLimits
from text_generation_router.api.http.keys import ApiKeys
from text_generation_router.api.http.listener import LAST_EVENTS_S, HttpServer
from text_generation_router.api.starting import create_starting_app
from text_generation_router.api.tgi.service import ModelInfo
from text_generation_router.chat.template_files import ChatTemplateError, ChatTemplates
from text_generation_router.config import RouterConfig, listen_host
from text_generation_router.discovery.parse import parse_source
from text_generation_router.discovery.peers import SharedShards
from text_generation_router.discovery.source import Address, Source, known
from text_generation_router.discovery.static import StaticSource
from text_generation_router.memory import collect_growth, configure_allocator, configure_collector
from text_generation_router.metrics import Metrics
from text_generation_router.metrics.connections import ConnectionMetrics
from text_generation_router.metrics.instruments import Registry
from text_generation_router.sandbox.pool import SandboxError
from text_generation_router.scheduling.policy import Dispatch, Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.first_join import join_all, join_first
from text_generation_router.shards.join import ReplicaInfo, merge_capabilities
from text_generation_router.text.tokenizer import Tokenizer, TokenizerError

log = structlog.get_logger()

VERSION = version("text-generation-trtllm")
TGI_TOP_N_TOKENS, OPENAI_TOP_LOGPROBS = 5, 20
"""The default of `--max-top-n-tokens` in each dialect: its own."""
QUEUED_KV_CACHES = 8
"""Default limit of queued work, in sizes of all KV caches."""


async def serve(config: RouterConfig) -> ExitCode:
    """Serve until a stop signal. Raises CannotServe."""
    configure_allocator()
    signals = StopSignals()
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(config.model_path))
        templates = load_templates(config)
    except (TokenizerError, ChatTemplateError) as error:
        raise CannotServe(str(error)) from error
    tracer = start_tracing(config, "text-generation-inference.router", f"router-{os.getpid()}", VERSION)
    notifier = Notifier()
    notifier.show(lambda: "waiting for a shard")
    source = _source("shards", config.shards) if config.shards else StaticSource(config.shard_address)
    if config.peers and not config.shards:
        raise CannotServe("--peers is for routers that share the shards of --shards: it is missing")
    peers = _source("peers", config.peers) if config.peers else None
    async with _answering_probes(config):
        joined = await _join(config, source, signals)
    if joined is None:
        return ExitCode.STOPPED
    model = merge_capabilities(joined.values())
    check_honoured(config, model)
    limits = resolve_limits(config, model)
    cluster, metrics = _cluster(config, model, limits)
    log.info("limits", max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens)
    settings = _settings(config, limits)
    if config.api_keys_file:
        in_thread = asyncio.get_running_loop().run_in_executor
        signals.on_hangup(partial(in_thread, None, _reload_keys, settings.api_keys))
    if not settings.api_keys and not ipaddress.ip_address(listen_host(config.hostname)).is_loopback:
        log.warning(
            "no API key on a public address: everyone who reaches it may use the model", hostname=config.hostname
        )
    try:
        async with assemble(
            tokenizer,
            templates,
            model.grammar_kinds,
            cluster,
            Permits(config.max_concurrent_requests, cluster.estimated_permit_wait),
            metrics,
            settings,
        ) as (serving, chats):
            try:
                app = create_app(
                    serving,
                    chats,
                    healthy=lambda: cluster.ready and not cluster.stopping,
                    info=_model_info(model, templates),
                    tracer=tracer,
                )
            except ValueError as error:  # an AIP_* path that is invalid or taken
                raise CannotServe(str(error)) from error
            run_cluster = partial(_run_cluster, cluster, config, source, peers, joined)
            return await _serve_http(config, app, cluster, metrics, run_cluster, signals, notifier)
    except (ChatTemplateError, SandboxError) as error:
        raise CannotServe(str(error)) from error
    finally:
        if tracer is not None:
            await tracer.close()


def _settings(config: RouterConfig, limits: Limits) -> Settings:
    try:
        keys = ApiKeys.of(config)
    except ValueError as error:
        raise CannotServe(str(error)) from error
    return Settings(limits, config, keys, VERSION)


def _reload_keys(keys: ApiKeys) -> None:
    try:
        keys.reload()
    except ValueError as error:
        log.error("API keys not read again: the old ones stay", reason=str(error))
    else:
        log.info("API keys read again")


def _model_info(model: ReplicaInfo, templates: ChatTemplates) -> ModelInfo:
    return ModelInfo(
        engine=model.info.engine,
        dtype=model.info.dtype,
        device_type=model.info.device.partition(":")[0],
        special_tokens=templates.special_tokens,
        chat_template=templates.default_text or None,
    )


def load_templates(config: RouterConfig) -> ChatTemplates:
    """Load the chat templates. Raises ChatTemplateError."""
    return ChatTemplates.load(
        Path(config.model_path),
        tokenizer_config=Path(config.tokenizer_config_path) if config.tokenizer_config_path else None,
        override=config.chat_template,
    )


def _source(flag: str, text: str) -> Source:
    """Return the source that a setting names. Raises CannotServe."""
    try:
        return parse_source(text)
    except ValueError as error:
        raise CannotServe(f"--{flag}: {error}") from error


@asynccontextmanager
async def _answering_probes(config: RouterConfig) -> AsyncIterator[None]:
    """Answer probes of a router whose shards may be long in coming, or driven by its peers."""
    if not config.shards:
        yield
        return
    server = HttpServer(create_starting_app(), ConnectionLimits(), ConnectionMetrics(Registry()))
    await _listen(server, config)
    log.info("alive, waiting for a shard", port=server.port)
    try:
        yield
    finally:
        await server.close()


async def _run_cluster(
    cluster: Cluster,
    config: RouterConfig,
    source: Source,
    peers: Source | None,
    joined: Mapping[Address, ReplicaInfo | None],
) -> None:
    """Drive all shards, or those that are assigned to this router."""
    limits = _warm_up_limits(config)
    if peers is None:
        await cluster.run(known(source), joined, limits, config)
        return
    shared = SharedShards(source, peers, config.port, config.peer_name)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(shared.run())
        await cluster.run(shared.members(), joined, limits, config)


async def _join(
    config: RouterConfig, source: Source, signals: StopSignals
) -> Mapping[Address, ReplicaInfo | None] | None:
    """Connect to shards and warm them up; None after a stop signal.

    The shards of --shards come and go: the first that joins will do. Those of --shard-address are all there; one that does
    not answer is None. Raises CannotServe.
    """
    limits = _warm_up_limits(config)
    async with asyncio.TaskGroup() as tasks:
        if config.shards:
            joining = tasks.create_task(join_first(source.members(), limits, config))
        else:
            joining = tasks.create_task(join_all(config.shard_address, limits, config, config.shard_connect_timeout))
        stopping = tasks.create_task(signals.stop.wait())
        await asyncio.wait((joining, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not joining.done():
            joining.cancel()
            return None
        return joining.result()


def _warm_up_limits(config: RouterConfig) -> WarmUpLimits:
    return WarmUpLimits(
        max_batch_prefill_tokens=config.max_batch_prefill_tokens or 0,
        max_batch_size=config.max_batch_size or 0,
        max_batch_total_tokens=config.max_batch_total_tokens or 0,
    )


def check_honoured(config: RouterConfig, model: ReplicaInfo) -> None:
    """Check that the engine supports the settings. Raises CannotServe."""
    if config.prefix_cache_per_tenant and "cache_salt" in model.unsupported:
        reason = model.unsupported["cache_salt"]
        raise CannotServe(f"`prefix_cache_per_tenant` is not supported by this engine: {reason}")


def resolve_limits(config: RouterConfig, model: ReplicaInfo) -> Limits:
    """Return the limits of one request: the settings, else the limits of model and KV cache. Raises CannotServe."""
    capacity = model.pool.num_blocks * model.pool.block_size
    # The last new token needs no KV, but a limit larger by one token is not worth a special case.
    allowed = min(capacity, model.info.max_sequence_length)
    total = config.max_total_tokens or allowed
    longest = total - 1 if config.max_input_tokens is None else config.max_input_tokens
    if not 0 < longest < total:
        raise CannotServe(f"`max_input_tokens`({longest}) must be < `max_total_tokens`({total})")
    if total > capacity:
        raise CannotServe(f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {total} and {capacity}")
    if total > model.info.max_sequence_length:
        raise CannotServe(
            f"`max_total_tokens`({total}) is more than the model's {model.info.max_sequence_length} positions"
        )
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
        unsupported=unsupported,
        always_logprobs=config.token_logprobs == "always",
    )


def _cluster(config: RouterConfig, model: ReplicaInfo, limits: Limits) -> tuple[Cluster, Metrics]:
    scheduler = Scheduler(_policy(config, model.info), replicas=0)
    metrics = Metrics(
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        scheduler=scheduler,
        log_drops_fd=config.log_drops_fd,
    )
    cluster = Cluster(scheduler, metrics.steps, config.hang_timeout)
    metrics.add_shards(cluster)
    metrics.add_names(config.metric_names, config.model_id or config.model_path)
    return cluster, metrics


def _policy(config: RouterConfig, info: pb.InfoResponse) -> Policy:
    """Return the scheduling policy: settings of the same name, and those that depend on the engine."""
    settings = {
        each.name: getattr(config, each.name) for each in fields(Policy) if each.name in RouterConfig.model_fields
    }
    return Policy(
        **settings
        | {
            "max_batch_prefill_tokens": config.max_batch_prefill_tokens or info.suggested_prefill_tokens,
            "chunk_tokens": info.suggested_chunk_tokens or None,
            "max_batch_size": min(config.max_batch_size or info.max_slots, info.max_slots),
            "target_itl_s": config.target_itl_ms / 1e3 or None,
            "dispatch": Dispatch(config.dispatch),
            "max_queued_caches": None if config.max_queued_tokens else QUEUED_KV_CACHES,
        }
    )


async def _serve_http(
    config: RouterConfig,
    app: web.Application,
    cluster: Cluster,
    metrics: Metrics,
    run_cluster: Callable[[], Coroutine[None, None, None]],
    signals: StopSignals,
    notifier: Notifier,
) -> ExitCode:
    limits = ConnectionLimits(config.max_connections, keep_alive_s=config.keep_alive_timeout)
    server = HttpServer(app, limits, metrics.connections)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run_cluster())
        notifier.show(partial(_status, cluster))
        beating = tasks.create_task(send_heartbeats(notifier))
        if not config.shards and not await _wait(cluster.opened(), signals):
            beating.cancel()
            running.cancel()
            return ExitCode.STOPPED
        try:
            await _listen(server, config)
            log.info("ready", url=f"http://{listen_host(config.hostname)}:{server.port}")
            configure_collector()
            collecting = tasks.create_task(collect_growth(lambda: not cluster.scheduler.requests))
            if config.peers or await _wait(cluster.settled(), signals):  # a router among peers may have no shard
                notifier.ready()
            await signals.stop.wait()
            collecting.cancel()
        finally:
            cluster.stopping = True
        if config.shutdown_delay:
            log.info("not ready, still accepting", seconds=config.shutdown_delay)
            with suppress(TimeoutError):
                async with asyncio.timeout(config.shutdown_delay):
                    await signals.hurry.wait()
        cluster.draining = True
        log.info("draining", requests=len(cluster.scheduler.requests))
        notifier.stopping()
        await _drain(server, cluster, signals, config.graceful_termination_timeout)
        beating.cancel()
        running.cancel()
    log.info("stopped")
    return ExitCode.STOPPED


def _status(cluster: Cluster) -> str:
    """Return the status for the service manager."""
    if cluster.draining:
        return f"draining {len(cluster.scheduler.requests)} requests"
    serving, known = len(cluster.scheduler.serving), len(cluster.scheduler.replicas)
    return f"serving with {serving} of {known} replicas" if serving else f"standby: drives none of {known} shards"


async def _listen(server: HttpServer, config: RouterConfig) -> None:
    host = listen_host(config.hostname)
    try:
        await server.listen(host, config.port, config.management_port)
    except OSError as error:
        ports = f"{config.port} or {config.management_port}" if config.management_port else str(config.port)
        raise CannotServe(f"cannot listen on {host}:{ports}: {error.strerror or error}") from error


async def _wait(event: Coroutine[None, None, None], signals: StopSignals) -> bool:
    """Wait for an event of the cluster; False after a stop signal."""
    async with asyncio.TaskGroup() as tasks:
        waiting, stopping = tasks.create_task(event), tasks.create_task(signals.stop.wait())
        await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        stopping.cancel()
    return not signals.stop.is_set()


async def _drain(server: HttpServer, cluster: Cluster, signals: StopSignals, timeout_s: float) -> None:
    """Let requests finish, for `timeout_s`, until a second signal or until no shard is left; then fail the rest.

    New ones are refused meanwhile.
    """
    async with asyncio.TaskGroup() as tasks:
        hurry = tasks.create_task(signals.hurry.wait())
        answered = tasks.create_task(server.answered())
        abandoned = tasks.create_task(cluster.abandoned())
        await asyncio.wait((answered, hurry, abandoned), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            cluster.give_up("the server was stopped")
            await asyncio.wait([answered], timeout=LAST_EVENTS_S)
        leaving = tasks.create_task(server.leave())
        await asyncio.wait((leaving, hurry), return_when=asyncio.FIRST_COMPLETED)
        for task in (hurry, answered, abandoned, leaving):
            task.cancel()
    await server.close()
