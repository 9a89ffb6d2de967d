"""The router's composition root: connect, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import structlog
from aiohttp import web

from text_generation_proto.client import ShardClient
from text_generation_proto.exit_codes import CannotServe, ExitCode
from text_generation_proto.values import WarmUpLimits
from text_generation_router.api.app import create_app
from text_generation_router.api.assemble import Model as ApiModel
from text_generation_router.api.assemble import assemble
from text_generation_router.api.core.admission import Permits
from text_generation_router.api.core.settings import Limits, Settings
from text_generation_router.api.http.caller import ApiKeys
from text_generation_router.api.tgi.service import ModelInfo
from text_generation_router.chat.template_files import ChatTemplateError, ChatTemplates
from text_generation_router.config import RouterConfig, listen_host
from text_generation_router.metrics import Metrics
from text_generation_router.request import TenantId
from text_generation_router.sandbox.pool import SandboxError
from text_generation_router.scheduling.policy import Dispatch, Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.join import CannotJoin, ReplicaInfo, join, merge_capabilities
from text_generation_router.text.tokenizer import Tokenizer, TokenizerError

log = structlog.get_logger()

VERSION = version("text-generation-trtllm")
LAST_WORDS_S = 0.3
"""Time for the error events of streams that are cut short to reach their clients."""


async def serve(config: RouterConfig) -> ExitCode:
    """Serve until told to stop. Raises CannotServe."""
    signals = StopSignals()
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(config.model_path), config.validation_workers)
        templates = _load_templates(config)
    except (TokenizerError, ChatTemplateError) as error:
        raise CannotServe(str(error)) from error
    joined = await _join_all(config, signals)
    if joined is None:
        return ExitCode.STOPPED
    model = merge_capabilities(joined)
    check_honoured(config, model)
    limits = resolve_limits(config, model)
    cluster, metrics = _cluster(config, joined, limits)
    log.info("limits", max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens)
    try:
        async with assemble(
            _api_model(config, model, tokenizer, templates),
            cluster,
            Permits(config.max_concurrent_requests, cluster.estimated_wait),
            metrics,
            _settings(config, limits),
        ) as (serving, chats):
            try:
                app = create_app(
                    serving,
                    chats,
                    healthy=lambda: cluster.connected and not cluster.draining,
                    info=_model_info(config, model, templates),
                )
            except ValueError as error:  # an AIP_* path that is none, or is taken
                raise CannotServe(str(error)) from error
            run_cluster = partial(cluster.run, config.shard_address, joined, _warm_up_limits(config))
            return await _serve_http(config, app, cluster, run_cluster, signals)
    except (ChatTemplateError, SandboxError) as error:
        raise CannotServe(str(error)) from error
    finally:
        tokenizer.close()


def _settings(config: RouterConfig, limits: Limits) -> Settings:
    return Settings(
        limits=limits,
        payload_limit=config.payload_limit,
        compute_type=config.compute_type,
        cors_allow_origin=config.cors_allow_origin,
        api_keys=_api_keys(config),
        vertex_predict_routes=(config.aip_predict_route,) if config.aip_predict_route else (),
        vertex_health_routes=(config.aip_health_route,) if config.aip_health_route else (),
        model_id=_model_id(config),
        fingerprint=f"{VERSION}-{config.docker_label or 'native'}",
        max_client_batch_size=config.max_client_batch_size,
        queue_timeout_s=config.queue_timeout,
        request_timeout_s=config.request_timeout,
        salt_per_tenant=config.prefix_cache_per_tenant,
    )


def _api_keys(config: RouterConfig) -> ApiKeys:
    try:
        return ApiKeys(config.api_key)
    except ValueError as error:
        raise CannotServe(str(error)) from error


def _model_info(config: RouterConfig, model: ReplicaInfo, templates: ChatTemplates) -> ModelInfo:
    return ModelInfo(
        model_id=_model_id(config),
        model_sha=config.revision,
        version=VERSION,
        validation_workers=config.validation_workers,
        max_client_batch_size=config.max_client_batch_size,
        docker_label=config.docker_label or None,
        engine=model.info.engine,
        dtype=model.info.dtype,
        device_type=model.info.device.partition(":")[0],
        special_tokens=templates.special_tokens,
        chat_template=templates.default_text or None,
    )


def _model_id(config: RouterConfig) -> str:
    return config.model_id or config.model_path


def _load_templates(config: RouterConfig) -> ChatTemplates:
    """Raises ChatTemplateError."""
    return ChatTemplates.load(
        Path(config.model_path),
        tokenizer_config=Path(config.tokenizer_config_path) if config.tokenizer_config_path else None,
        override=config.chat_template,
    )


def _api_model(config: RouterConfig, model: ReplicaInfo, tokenizer: Tokenizer, templates: ChatTemplates) -> ApiModel:
    grammars = bool(model.grammar_kinds) and not config.disable_grammar_support
    return ApiModel(
        tokenizer,
        templates,
        grammar_vocabulary=Path(config.model_path) / "tokenizer.json" if grammars else None,
        grammar_kinds=model.grammar_kinds,
        tool_call_parser=config.tool_call_parser,
        reasoning=config.split_reasoning,
    )


class StopSignals:
    """SIGTERM, SIGINT or SIGHUP: the first asks to drain, a second one to hurry."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(sig, self._received)

    def _received(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def _join_all(config: RouterConfig, signals: StopSignals) -> list[ReplicaInfo | None] | None:
    """Wait for the shards and warm them up, side by side; None if told to stop meanwhile.

    One that does not answer is gone on without, as long as another does. Raises CannotServe.
    """
    async with asyncio.TaskGroup() as tasks:
        joining = tasks.create_task(_first_joins(config))
        stopping = tasks.create_task(signals.stop.wait())
        await asyncio.wait((joining, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not joining.done():
            joining.cancel()
            return None
        return joining.result()


async def _first_joins(config: RouterConfig) -> list[ReplicaInfo | None]:
    failures: list[CannotJoin] = []
    async with asyncio.TaskGroup() as tasks:
        joins = [tasks.create_task(_first_join(address, config, failures)) for address in config.shard_address]
    joined = [one.result() for one in joins]
    present = [one for one in joined if one is not None]
    if failures:
        raise CannotServe(str(failures[0]))
    if not present:
        raise CannotServe(f"no shard answers at {', '.join(config.shard_address)}")
    like = merge_capabilities(present)
    for number, one in enumerate(present):
        if difference := one.differs_from(like):
            raise CannotServe(f"the shards serve different things; one of number {number}: {difference}")
    return joined


async def _first_join(address: str, config: RouterConfig, failures: list[CannotJoin]) -> ReplicaInfo | None:
    try:
        async with ShardClient.connect(address) as client:
            return await join(client, _warm_up_limits(config), address, config.shard_connect_timeout)
    except CannotJoin as error:
        failures.append(error)
    except TimeoutError:
        log.error("no shard answers", address=address)
    return None


def _warm_up_limits(config: RouterConfig) -> WarmUpLimits:
    return WarmUpLimits(
        max_batch_prefill_tokens=config.max_batch_prefill_tokens or 0,
        max_batch_size=config.max_batch_size or 0,
        max_batch_total_tokens=config.max_batch_total_tokens or 0,
    )


def check_honoured(config: RouterConfig, model: ReplicaInfo) -> None:
    """The engine can do what the operator wants of every request. Raises CannotServe."""
    if config.prefix_cache_per_tenant and "cache_salt" in model.unsupported:
        reason = model.unsupported["cache_salt"]
        raise CannotServe(f"`prefix_cache_per_tenant` is not supported by this engine: {reason}")


def resolve_limits(config: RouterConfig, model: ReplicaInfo) -> Limits:
    """The limits of one request: the operator's, else what model and KV cache allow. Raises CannotServe."""
    capacity = model.pool.num_blocks * model.pool.block_size
    # The last new token needs no place in the KV cache, but one token more is not worth a special case.
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
    most_tops = config.max_top_n_tokens
    if "top_n" not in model.unsupported:  # there the engine's own reason says more than a limit of 0
        most_tops = min(most_tops, model.info.max_top_n_tokens)
    return Limits(
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=most_tops,
        max_input_tokens=longest,
        max_total_tokens=total,
        vocab_size=model.info.vocab_size,
        unsupported=model.unsupported,
    )


QUEUED_POOLS = 8
"""Work that may wait by default, in fillings of the KV caches."""


def _cluster(config: RouterConfig, joined: Sequence[ReplicaInfo | None], limits: Limits) -> tuple[Cluster, Metrics]:
    present = [one for one in joined if one is not None]
    info = present[0].info
    capacity = sum(one.pool.num_blocks * one.pool.block_size for one in present)
    policy = Policy(
        max_batch_prefill_tokens=config.max_batch_prefill_tokens or info.suggested_prefill_tokens,
        max_batch_size=min(config.max_batch_size or info.max_slots, info.max_slots),
        waiting_served_ratio=config.waiting_served_ratio,
        max_decode_steps_between_prefills=config.max_waiting_tokens,
        target_itl_s=config.target_itl_ms / 1e3 or None,
        prefix_caching=config.prefix_caching,
        dispatch=Dispatch(config.dispatch),
        tenant_weights={TenantId(name): weight for name, weight in config.tenant_weights.items()},
        max_queued_tokens=config.max_queued_tokens or QUEUED_POOLS * capacity,
        max_moves=config.max_request_moves,
    )
    scheduler = Scheduler(policy, len(joined))
    metrics = Metrics(
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        scheduler=scheduler,
    )
    return Cluster(scheduler, metrics.steps), metrics


async def _serve_http(
    config: RouterConfig,
    app: web.Application,
    cluster: Cluster,
    run_cluster: Callable[[], Coroutine[None, None, None]],
    signals: StopSignals,
) -> ExitCode:
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        # What is no HTTP at all is the client's business; what our handlers raise, our middleware logs.
        logger=_silent(),
        # Later than our own: who is cut short is to hear of it.
        shutdown_timeout=config.graceful_termination_timeout + 2 * LAST_WORDS_S,
    )
    await runner.setup()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run_cluster())
        if not await _opened(cluster, signals):
            running.cancel()
            await runner.cleanup()
            return ExitCode.STOPPED
        try:
            await _listen(runner, config)
            # What lives as long as the process is no work for the garbage collector.
            gc.collect()
            gc.freeze()
            # Tokens are freed by reference counts: looking for cycles every few hundred of them finds none.
            gc.set_threshold(50_000, 20, 50)
            await signals.stop.wait()
        finally:
            cluster.draining = True
        log.info("draining", requests=len(cluster.scheduler.requests))
        await _drain(runner, cluster, signals, config.graceful_termination_timeout)
        running.cancel()
    log.info("stopped")
    return ExitCode.STOPPED


def _silent() -> logging.Logger:
    logger = logging.getLogger("aiohttp.server")
    logger.disabled = True
    return logger


async def _listen(runner: web.AppRunner, config: RouterConfig) -> None:
    host = listen_host(config.hostname)
    site = web.TCPSite(runner, host, config.port, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        raise CannotServe(f"cannot listen on {host}:{config.port}: {error.strerror or error}") from error
    port = runner.addresses[0][1]
    log.info("ready", url=f"http://{host}:{port}")


async def _opened(cluster: Cluster, signals: StopSignals) -> bool:
    """Wait for a replica; False if told to stop meanwhile."""
    async with asyncio.TaskGroup() as tasks:
        opened, stopping = tasks.create_task(cluster.opened()), tasks.create_task(signals.stop.wait())
        await asyncio.wait((opened, stopping), return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        stopping.cancel()
    return cluster.connected and not signals.stop.is_set()


async def _drain(runner: web.AppRunner, cluster: Cluster, signals: StopSignals, timeout_s: float) -> None:
    """Stop accepting, let what runs finish, within `timeout_s` and unless told to hurry; who is cut short is told."""
    async with asyncio.TaskGroup() as tasks:
        cleanup = tasks.create_task(runner.cleanup())
        hurry = tasks.create_task(signals.hurry.wait())
        await asyncio.wait((cleanup, hurry), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not cleanup.done():
            cluster.give_up("the server was stopped")
            await asyncio.wait([cleanup], timeout=LAST_WORDS_S)
        cleanup.cancel()
        hurry.cancel()
