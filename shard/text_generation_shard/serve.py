"""Run a shard: listen, load the model, serve, stop in order."""

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

from text_generation_proto.channel import server_credentials
from text_generation_proto.exit_codes import CannotServe, ExitCode
from text_generation_proto.notify import Notifier
from text_generation_proto.sockets import SocketInUse, claim_socket, remove_socket, socket_path
from text_generation_proto.v1 import shard_pb2, shard_pb2_grpc
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.guard import create_server
from text_generation_shard.progress import report_progress
from text_generation_shard.servicer import ShardServicer
from text_generation_shard.session import EngineThread, SessionOwner

log = structlog.get_logger()


async def serve(config: ShardConfig) -> ExitCode:
    """Serve until a signal arrives or the engine fails. Raises CannotServe."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(sig, stopping.set)
    thread = EngineThread()
    owner = SessionOwner(thread)
    health = grpc_health.HealthServicer()
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = create_server(config.shard_token)
    services = _add_services(server, config, owner, health)
    if config.reflection:
        reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], server)
    if socket_path(config.address) is None and not config.shard_token:
        log.warning("every process that reaches this port may use the shard: set SHARD_TOKEN", address=config.address)
    with _listening(server, config):
        await server.start()
        log.info("loading", engine=config.engine, model=config.model_path)
        notifier = Notifier()
        notifier.show(lambda: f"loading {config.model_path}")
        code = await _serve_engine(config, thread, owner, health, notifier, stopping)
        await health.enter_graceful_shutdown()
        owner.stop()
        await server.stop(grace=1.0)
        thread.close()
        return code


def _add_services(
    server: grpc.aio.Server, config: ShardConfig, owner: SessionOwner, health: grpc_health.HealthServicer
) -> list[str]:
    """Register the services; return their names."""
    shard_pb2_grpc.add_ShardServicer_to_server(ShardServicer(owner, config.rank, config.world_size), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [
        shard_pb2.DESCRIPTOR.services_by_name["Shard"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    ]
    # A follower only mirrors rank 0: it has no sessions.
    if config.gateway and config.rank == 0:
        from text_generation_proto.gateway import trtllm_service_pb2, trtllm_service_pb2_grpc
        from text_generation_shard.gateway.servicer import GatewayServicer

        folder = Path(config.model_path) if config.model_path else None
        gateway = GatewayServicer(owner, folder, tensor_parallel=config.tensor_parallel)
        trtllm_service_pb2_grpc.add_TrtllmServiceServicer_to_server(gateway, server)
        names.append(trtllm_service_pb2.DESCRIPTOR.services_by_name["TrtllmService"].full_name)
    return names


async def _serve_engine(
    config: ShardConfig,
    thread: EngineThread,
    owner: SessionOwner,
    health: grpc_health.HealthServicer,
    notifier: Notifier,
    stopping: asyncio.Event,
) -> ExitCode:
    loading = thread.submit(build_engine, config)
    await _wait_for_either(stopping.wait(), asyncio.wait((loading,)))
    if stopping.is_set():
        return ExitCode.STOPPED
    try:
        engine = await loading
    except EngineError as error:
        raise CannotServe(str(error)) from error
    info = engine.info
    owner.serve(engine)
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    log.info("serving", address=config.address, engine=info.engine, model=info.model_id, dtype=info.dtype)
    notifier.show(lambda: f"serving {info.model_id} at {config.address}")
    notifier.ready()
    async with asyncio.TaskGroup() as tasks:
        reporting = tasks.create_task(report_progress(owner.monitor, engine, health, config.hang_timeout, notifier))
        await _wait_for_either(stopping.wait(), owner.crashed.wait())
        reporting.cancel()
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    # While a group stops, a rank may see another rank leave first. That is no crash.
    if owner.crashed.is_set() and not stopping.is_set():
        return ExitCode.BUG
    log.info("stopping")
    notifier.stopping()
    owner.stop()
    closing = thread.submit(engine.close)
    try:
        await asyncio.wait_for(asyncio.shield(closing), config.shutdown_timeout)
    except TimeoutError:
        log.warning("the step in progress did not end in time", seconds=config.shutdown_timeout)
    return ExitCode.STOPPED


async def _wait_for_either(first: Awaitable[object], second: Awaitable[object]) -> None:
    """Wait until one of two awaitables is done, then stop waiting for the other."""

    async def wait(awaitable: Awaitable[object]) -> None:
        await awaitable

    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(wait(first)), tasks.create_task(wait(second))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()


@contextmanager
def _listening(server: grpc.aio.Server, config: ShardConfig) -> Iterator[None]:
    """Bind the address. A unix socket is accessible to its owner only, and removed at the end."""
    address = config.address
    path = socket_path(address)
    if path is not None:
        try:
            claim_socket(path)
        except SocketInUse as error:
            raise CannotServe(str(error)) from error
    # A umask, not a later chmod: the socket must never exist with wider permissions.
    umask = os.umask(0o177)
    try:
        if config.shard_tls_cert and path is None:
            server.add_secure_port(address, server_credentials(config))
        else:
            server.add_insecure_port(address)
    except (OSError, RuntimeError) as error:
        raise CannotServe(f"cannot listen on {address}: {error}") from error
    finally:
        os.umask(umask)
    try:
        yield
    finally:
        if path is not None:
            remove_socket(path)
