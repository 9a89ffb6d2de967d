"""The router's composition root: connect, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import grpc
import structlog
from aiohttp import web

from text_generation_proto.client import ShardClient
from text_generation_proto.process import ExitCode
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.api.app import create_app
from text_generation_router.api.assemble import Model as ApiModel
from text_generation_router.api.assemble import assemble
from text_generation_router.api.core.admission import Permits
from text_generation_router.api.core.settings import Settings
from text_generation_router.api.core.validation import Limits
from text_generation_router.api.http.auth import ApiKeys
from text_generation_router.api.tgi.service import ModelInfo
from text_generation_router.chat.template import ChatTemplateError, ChatTemplates
from text_generation_router.config import RouterConfig, listen_host
from text_generation_router.generation import Generations
from text_generation_router.metrics import Metrics
from text_generation_router.sandbox.errors import SandboxError
from text_generation_router.scheduling.blocks import BlockPool
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.replica import Replica, ShardLost
from text_generation_router.text.tokenizer import Tokenizer, TokenizerError

log = structlog.get_logger()

VERSION = version("text-generation-trtllm")
LOST_GRACE_S = 1.0
"""Time for the error events of a lost shard to reach their clients."""


class CannotServe(Exception):
    """The router cannot start; one clear line."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the shard said of itself, and the KV pool it measured."""

    info: pb.InfoResponse
    pool: pb.WarmUpResponse


async def serve(config: RouterConfig) -> ExitCode:
    """Serve until told to stop or the shard is lost. Raises CannotServe."""
    signals = StopSignals()
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(config.model_path), config.validation_workers)
        templates = _load_templates(config)
    except (TokenizerError, ChatTemplateError) as error:
        raise CannotServe(str(error)) from error
    async with ShardClient.connect(config.shard_address) as client:
        model = await _connect(client, config, signals)
        if model is None:
            return ExitCode.STOPPED
        limits = resolve_limits(config, model)
        replica, metrics = _replica(client, config, model, limits)
        generations = Generations(replica, tokenizer)
        log.info("limits", max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens)
        try:
            async with assemble(
                _api_model(config, model, tokenizer, templates),
                generations,
                Permits(config.max_concurrent_requests),
                metrics,
                _settings(config, limits),
            ) as (serving, turns):
                try:
                    app = create_app(
                        serving,
                        turns,
                        healthy=lambda: replica.connected and not generations.draining,
                        info=_model_info(config, templates),
                    )
                except ValueError as error:  # an AIP_* path that is none, or is taken
                    raise CannotServe(str(error)) from error
                return await _serve_http(config, app, replica, generations, signals)
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
    )


def _api_keys(config: RouterConfig) -> ApiKeys:
    try:
        return ApiKeys(config.api_key)
    except ValueError as error:
        raise CannotServe(str(error)) from error


def _model_info(config: RouterConfig, templates: ChatTemplates) -> ModelInfo:
    return ModelInfo(
        model_id=_model_id(config),
        model_sha=config.revision,
        version=VERSION,
        validation_workers=config.validation_workers,
        max_client_batch_size=config.max_client_batch_size,
        docker_label=config.docker_label or None,
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


def _api_model(config: RouterConfig, model: Model, tokenizer: Tokenizer, templates: ChatTemplates) -> ApiModel:
    grammars = bool(model.info.grammar_kinds) and not config.disable_grammar_support
    return ApiModel(
        tokenizer,
        templates,
        grammar_vocabulary=Path(config.model_path) / "tokenizer.json" if grammars else None,
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


async def _connect(client: ShardClient, config: RouterConfig, signals: StopSignals) -> Model | None:
    """Wait for the shard and warm it up; None if told to stop meanwhile."""
    async with asyncio.TaskGroup() as tasks:
        warming = tasks.create_task(_warm_up(client, config))
        stopping = tasks.create_task(signals.stop.wait())
        await asyncio.wait((warming, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not warming.done():
            warming.cancel()
            return None
        return warming.result()


async def _warm_up(client: ShardClient, config: RouterConfig) -> Model:
    try:
        await client.ready(config.shard_connect_timeout)
        info = await client.info()
        if info.scheduling != pb.SCHEDULING_STEP:
            raise CannotServe(f"engine {info.engine} schedules for itself, which this router does not serve yet")
        pool = await client.warm_up(
            max_batch_prefill_tokens=config.max_batch_prefill_tokens or 0,
            max_batch_size=_max_batch_size(config, info),
            max_batch_total_tokens=config.max_batch_total_tokens or 0,
        )
    except TimeoutError as error:
        raise CannotServe(f"no shard answers at {config.shard_address}") from error
    except grpc.aio.AioRpcError as error:
        raise CannotServe(f"the shard cannot warm up: {error.details()}") from error
    return Model(info, pool)


def _max_batch_size(config: RouterConfig, info: pb.InfoResponse) -> int:
    return min(config.max_batch_size or info.max_slots, info.max_slots)


def resolve_limits(config: RouterConfig, model: Model) -> Limits:
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
    return Limits(
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=min(config.max_top_n_tokens, model.info.max_top_n_tokens),
        max_input_tokens=longest,
        max_total_tokens=total,
        vocab_size=model.info.vocab_size,
    )


def _replica(client: ShardClient, config: RouterConfig, model: Model, limits: Limits) -> tuple[Replica, Metrics]:
    info = model.info
    scheduler = Scheduler(
        BlockPool(model.pool.num_blocks, model.pool.block_size),
        info.max_slots,
        Policy(
            max_batch_prefill_tokens=config.max_batch_prefill_tokens or info.suggested_prefill_tokens,
            max_batch_size=_max_batch_size(config, info),
            waiting_served_ratio=config.waiting_served_ratio,
            max_decode_steps_between_prefills=config.max_waiting_tokens,
        ),
    )
    metrics = Metrics(
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        scheduler=scheduler,
    )
    return Replica(client, scheduler, info.eos_token_ids, metrics.steps), metrics


async def _serve_http(
    config: RouterConfig, app: web.Application, replica: Replica, generations: Generations, signals: StopSignals
) -> ExitCode:
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        # What is no HTTP at all is the client's business; what our handlers raise, our middleware logs.
        logger=_silent(),
        shutdown_timeout=config.graceful_termination_timeout,
    )
    await runner.setup()
    code = ExitCode.STOPPED
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(_run(replica))
        stopping = tasks.create_task(signals.stop.wait())
        await replica.opened()
        try:
            await _listen(runner, config)
            # What lives as long as the process is no work for the garbage collector.
            gc.collect()
            gc.freeze()
            # Tokens are freed by reference counts: looking for cycles every few hundred of them finds none.
            gc.set_threshold(50_000, 20, 50)
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            generations.draining = True
        if running.done():
            log.error("shard lost", reason=running.result())
            code = ExitCode.DEPENDENCY_LOST
            with suppress(TimeoutError):
                await asyncio.wait_for(runner.cleanup(), LOST_GRACE_S)
        else:
            log.info("draining", requests=len(replica.scheduler.requests))
            await _drain(runner, signals)
        stopping.cancel()
        running.cancel()
    log.info("stopped")
    return code


def _silent() -> logging.Logger:
    logger = logging.getLogger("aiohttp.server")
    logger.disabled = True
    return logger


async def _run(replica: Replica) -> str:
    """Run the replica; why it was lost."""
    try:
        await replica.run()
    except ShardLost as error:
        return str(error)
    raise AssertionError("a replica runs until it is lost")


async def _listen(runner: web.AppRunner, config: RouterConfig) -> None:
    host = listen_host(config.hostname)
    site = web.TCPSite(runner, host, config.port, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        raise CannotServe(f"cannot listen on {host}:{config.port}: {error.strerror or error}") from error
    port = runner.addresses[0][1]
    log.info("ready", url=f"http://{host}:{port}")


async def _drain(runner: web.AppRunner, signals: StopSignals) -> None:
    """Stop accepting, let what runs finish, within the runner's timeout and unless told to hurry."""
    async with asyncio.TaskGroup() as tasks:
        cleanup = tasks.create_task(runner.cleanup())
        hurry = tasks.create_task(signals.hurry.wait())
        await asyncio.wait((cleanup, hurry), return_when=asyncio.FIRST_COMPLETED)
        cleanup.cancel()
        hurry.cancel()
