"""The shard's composition root: listen, load, serve, stop in order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health
from grpc_reflection.v1alpha import reflection

from text_generation_proto.channel import SERVER_OPTIONS
from text_generation_proto.gateway import trtllm_service_pb2, trtllm_service_pb2_grpc
from text_generation_proto.process import ExitCode, SocketInUse, claim_socket, remove_socket, socket_path
from text_generation_proto.v1 import shard_pb2, shard_pb2_grpc
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.gateway.host import HostServicer
from text_generation_shard.gateway.servicer import GatewayServicer
from text_generation_shard.servicer import EngineThread

log = structlog.get_logger()


class CannotServe(Exception):
    """The shard cannot start; one clear line."""


async def serve(config: ShardConfig) -> ExitCode:
    """Serve until told to stop or the engine breaks. Raises CannotServe."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(sig, stopping.set)
    thread = EngineThread()
    servicer = HostServicer(thread, config.rank, config.world_size)
    health = grpc_health.HealthServicer()
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    shard_pb2_grpc.add_ShardServicer_to_server(servicer, server)
    # A follower computes what rank 0 says: there is nothing to ask it for.
    gateway_served = config.gateway and config.rank == 0
    if gateway_served:
        folder = Path(config.model_path) if config.model_path else None
        gateway = GatewayServicer(servicer, folder, tensor_parallel=config.tensor_parallel)
        trtllm_service_pb2_grpc.add_TrtllmServiceServicer_to_server(gateway, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if config.reflection:
        names = [shard_pb2.DESCRIPTOR.services_by_name["Shard"].full_name, reflection.SERVICE_NAME]
        if gateway_served:
            names.append(trtllm_service_pb2.DESCRIPTOR.services_by_name["TrtllmService"].full_name)
        reflection.enable_server_reflection(
            [*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name], server
        )
    with _listening(server, config.address):
        await server.start()
        log.info("loading", engine=config.engine, model=config.model_path)
        code = await _serve_engine(config, thread, servicer, health, stopping)
        await health.enter_graceful_shutdown()
        servicer.stop_lending()
        servicer.end_session()
        await server.stop(grace=1.0)
        thread.close()
        return code


async def _serve_engine(
    config: ShardConfig,
    thread: EngineThread,
    servicer: HostServicer,
    health: grpc_health.HealthServicer,
    stopping: asyncio.Event,
) -> ExitCode:
    loading = thread.submit(build_engine, config)
    await _first(stopping.wait(), asyncio.wait((loading,)))
    if stopping.is_set():
        return ExitCode.STOPPED
    try:
        engine = await loading
    except EngineError as error:
        raise CannotServe(str(error)) from error
    info = engine.info
    servicer.serve(engine)
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    log.info("serving", address=config.address, engine=info.engine, model=info.model_id, dtype=info.dtype)
    await _first(stopping.wait(), servicer.crashed.wait())
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    # A group is stopped together: one that has just lost another need not say so.
    if servicer.crashed.is_set() and not stopping.is_set():
        return ExitCode.BUG
    log.info("stopping")
    servicer.stop_lending()
    servicer.end_session()
    closing = thread.submit(engine.close)
    try:
        await asyncio.wait_for(asyncio.shield(closing), config.shutdown_timeout)
    except TimeoutError:
        log.warning("the step in progress did not end in time", seconds=config.shutdown_timeout)
    return ExitCode.STOPPED


async def _first(one: Awaitable[object], other: Awaitable[object]) -> None:
    """Wait for either; neither is cancelled."""

    async def wait(awaitable: Awaitable[object]) -> None:
        await awaitable

    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(wait(one)), tasks.create_task(wait(other))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()


@contextmanager
def _listening(server: grpc.aio.Server, address: str) -> Iterator[None]:
    """Bind `address`; a unix socket is for its owner alone, and gone afterwards."""
    path = socket_path(address)
    if path is not None:
        try:
            claim_socket(path)
        except SocketInUse as error:
            raise CannotServe(str(error)) from error
    # The socket must never be there with wider rights, not even until a chmod.
    umask = os.umask(0o177)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise CannotServe(f"cannot listen on {address}: {error}") from error
    finally:
        os.umask(umask)
    try:
        yield
    finally:
        if path is not None:
            remove_socket(path)
