"""Run a shard: listen, load the model, serve, stop in order."""

import asyncio
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from importlib.metadata import version
from threading import Thread

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_common.heartbeat import HeartbeatSender
from text_generation_common.log import log
from text_generation_common.notify import Notifier
from text_generation_common.sockets import claim_socket, remove_socket
from text_generation_common.stop_signals import StopSignals
from text_generation_common.tracing import start_tracing
from text_generation_common.waiting import background, first_of
from text_generation_proto.addresses import host_of, join_host_port, socket_path
from text_generation_proto.v1 import shard_pb2, shard_pb2_grpc
from text_generation_shard.config import ShardConfig
from text_generation_shard.convert import info_to_pb
from text_generation_shard.engine import Engine, EngineError, Scheduling
from text_generation_shard.engines import build_engine
from text_generation_shard.gpu_watch import watch_gpus
from text_generation_shard.gpus import Gpu, GpusUnreadable, gpus_of_shard, stay_near
from text_generation_shard.guard import create_server, server_credentials
from text_generation_shard.health import ShardHealth
from text_generation_shard.progress import report_progress
from text_generation_shard.servicer import ShardServicer
from text_generation_shard.session import SessionOwner

DRAIN_POLL_S = 0.05
"""Seconds between two looks at a session that drains."""
MAX_PROBES = 64
"""Most concurrent calls on the plain port: anyone may call there."""
IDLE_S = 1.0
"""Seconds without a sequence after which a draining session is ended for a client that does not end it."""


async def serve(config: ShardConfig) -> ExitCode:
    """Serve until a signal arrives or the engine fails. Raises CannotServe."""
    signals = StopSignals()
    gpus = await _find_gpus(config)
    async with AsyncExitStack() as stack:
        names = "text-generation-inference.server", f"shard-{config.replica}", version("text-generation-trtllm")
        tracer = start_tracing(config, *names)
        if tracer is not None:
            stack.push_async_callback(tracer.close)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        owner, health = SessionOwner(thread, tracer), ShardHealth()
        await health.set_serving(serving=False)
        server = _shard_server(config, owner, health)
        stack.enter_context(_listening(server, config))
        servers = (server, *_probe_server(config, health))
        for each in servers:
            await each.start()
        code = await _serve_engine(config, thread, owner, health, signals, gpus)
        await health.stop()
        owner.stop()
        for each in servers:
            await each.stop(grace=1.0 if each is server else None)
        thread.shutdown(wait=False, cancel_futures=True)
        return code


def _shard_server(config: ShardConfig, owner: SessionOwner, health: ShardHealth) -> grpc.aio.Server:
    server = create_server(config.shard_token)
    shard_pb2_grpc.add_ShardServicer_to_server(ShardServicer(owner, health, config), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if config.reflection:
        services = (*shard_pb2.DESCRIPTOR.services_by_name.values(), *health_pb2.DESCRIPTOR.services_by_name.values())
        reflection.enable_server_reflection([each.full_name for each in services] + [reflection.SERVICE_NAME], server)
    return server


def _probe_server(config: ShardConfig, health: ShardHealth) -> list[grpc.aio.Server]:
    """Return a server of health checks alone, without TLS and token, if there is a --health-port. Raises CannotServe."""
    if not config.health_port:
        return []
    address = join_host_port(host_of(config.address), config.health_port)
    server = create_server(max_calls=MAX_PROBES)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise CannotServe(f"cannot listen on {address}: {error}") from error
    return [server]


async def _serve_engine(
    config: ShardConfig,
    thread: ThreadPoolExecutor,
    owner: SessionOwner,
    health: ShardHealth,
    signals: StopSignals,
    gpus: tuple[tuple[Gpu, ...], str],
) -> ExitCode:
    log.info("loading", engine=config.engine, model=config.model_path)
    notifier = Notifier()
    notifier.show(lambda: f"loading {config.model_path}")
    loading = asyncio.get_running_loop().run_in_executor(thread, build_engine, config)
    await first_of(signals.stop.wait(), asyncio.wait((loading,)))
    if signals.stop.is_set():
        return ExitCode.STOPPED
    try:
        engine = await loading
    except EngineError as error:
        raise CannotServe(str(error)) from error
    info = engine.info
    if info.scheduling is Scheduling.SELF:
        # Its outputs are objects of this process: each search for cycles among them would also go through all of the library's.
        gc.collect()
        gc.freeze()
    owner.serve(engine)
    if info.device != "cpu":
        _watch(*gpus, owner)
    await health.set_serving(serving=True)
    log.info("serving", address=config.address, engine=info.engine, model=info.model_id, dtype=info.dtype)
    notifier.show(lambda: f"serving {info.model_id} at {config.address}")
    notifier.ready()
    heartbeat = HeartbeatSender(notifier)
    heartbeat.serves(info_to_pb(info, config.rank, config.world_size).SerializeToString())
    async with background(report_progress(owner.monitor, engine, health, config.hang_timeout, heartbeat)):
        await first_of(signals.stop.wait(), owner.crashed.wait())
        await health.stop()
        if signals.stop.is_set():
            notifier.show(lambda: f"draining {engine.running} sequences")
            notifier.stopping()
            await _drain(config, owner, engine, signals.hurry)
    # While a group stops, a rank may see another rank leave first. That is not a crash.
    if owner.crashed.is_set() and not signals.stop.is_set():
        return ExitCode.FAILED if owner.fault else ExitCode.BUG
    log.info("stopping", sequences=engine.running)
    owner.stop()
    closing = asyncio.get_running_loop().run_in_executor(thread, engine.close)
    try:
        await asyncio.wait_for(asyncio.shield(closing), config.shutdown_timeout)
    except TimeoutError:
        log.warning("the step in progress did not end in time", seconds=config.shutdown_timeout)
    return ExitCode.STOPPED


async def _find_gpus(config: ShardConfig) -> tuple[tuple[Gpu, ...], str]:
    """Move to the cores near the GPUs before the engine's threads start; return those to observe, and why there are none."""
    try:
        # The first call after boot initialises the driver, which takes seconds.
        own, observed = await asyncio.to_thread(gpus_of_shard, config, os.environ)
    except GpusUnreadable as error:
        return (), str(error)
    stay_near(own)
    return observed, "none is visible"


def _watch(gpus: tuple[Gpu, ...], reason: str, owner: SessionOwner) -> None:
    if not gpus:
        log.info("GPUs are not observed", reason=reason)
        return
    loop = asyncio.get_running_loop()

    def on_fault(fault: str) -> None:
        log.error("a GPU failed", fault=fault)
        with suppress(RuntimeError):  # the loop is closed: the process is exiting
            loop.call_soon_threadsafe(owner.fail, fault)

    def on_states(states: list[shard_pb2.GpuState]) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(owner.show_gpus, states)

    Thread(target=watch_gpus, args=(gpus, on_states, on_fault), name="gpus", daemon=True).start()


async def _drain(config: ShardConfig, owner: SessionOwner, engine: Engine, hurry: asyncio.Event) -> None:
    """Let the sequences end, for at most --drain-timeout or until a second signal."""
    if config.drain_timeout:
        log.info("draining", sequences=engine.running)
        with suppress(TimeoutError):
            async with asyncio.timeout(config.drain_timeout):
                await first_of(_drained(owner, engine, config.rank), hurry.wait())


async def _drained(owner: SessionOwner, engine: Engine, rank: int) -> None:
    """Wait until the session has ended: its router ends it when it has no sequences left. A follower waits for rank 0."""
    owner.drain()
    idle_s = 0.0
    while not owner.crashed.is_set() and (rank or not await owner.wait_until_free()) and idle_s < IDLE_S:
        await asyncio.sleep(DRAIN_POLL_S)
        idle_s = 0.0 if rank or engine.running else idle_s + DRAIN_POLL_S


@contextmanager
def _listening(server: grpc.aio.Server, config: ShardConfig) -> Iterator[None]:
    """Bind the address. A unix socket is accessible to its owner only, and removed at the end."""
    address = config.address
    path = socket_path(address)
    if path is None and not config.shard_token:
        log.warning("every process that reaches this port may use the shard: set SHARD_TOKEN", address=address)
    if path is not None:
        claim_socket(path)
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
