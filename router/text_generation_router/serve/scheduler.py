"""The scheduler process: queue, scheduling and shards for all HTTP workers. It serves no HTTP and knows no text."""

from pathlib import Path

from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_common.heartbeat import send_heartbeats
from text_generation_common.log import log
from text_generation_common.notify import Notifier
from text_generation_common.sockets import SocketInUse
from text_generation_common.stop_signals import StopSignals
from text_generation_common.waiting import background, first_of, holds_for
from text_generation_router.config import RouterConfig
from text_generation_router.memory import configure_allocator, configure_collector, give_back_memory
from text_generation_router.rate_limits import RateLimits
from text_generation_router.serve.draining import drain
from text_generation_router.serve.shards import Shards
from text_generation_router.stats.summed import SummedStats
from text_generation_router.worker_link.columns import WorkerDelivery
from text_generation_router.worker_link.remote_limits import rate_handlers
from text_generation_router.worker_link.server import WorkerLinkServer

DRAIN_CHECK_S = 0.02
"""Seconds without a request after which a process has drained."""


async def serve_workers(config: RouterConfig) -> ExitCode:
    """Serve HTTP workers until a stop signal. Raises CannotServe."""
    configure_allocator()
    signals = StopSignals()
    if config.api_keys_file:
        signals.on_hangup(lambda: None)  # the workers read the keys again
    notifier = Notifier()
    notifier.show(lambda: "waiting for a shard")
    shards = Shards(config)
    if (model := await shards.join(signals)) is None:
        return ExitCode.STOPPED
    delivery = WorkerDelivery()
    cluster, metrics, permits = shards.cluster(model, delivery)
    link_server = WorkerLinkServer(cluster, delivery, permits, model)
    stats = SummedStats(metrics, cluster, link_server.connections)
    link_server.handlers.update({**stats.handlers, **rate_handlers(RateLimits())})
    notifier.show(lambda: cluster.status)
    async with background(shards.drive(cluster), send_heartbeats(notifier), give_back_memory()):
        if not config.shards:
            await first_of(cluster.opened(), signals.stop.wait())
        if signals.stop.is_set():
            return ExitCode.STOPPED
        try:
            audited = shards.audit(stats.state.events)
            async with link_server.listening(Path(config.worker_socket)), background(stats.run(), audited):
                log.info("ready for HTTP workers", socket=config.worker_socket)
                configure_collector()
                if not config.peers:
                    await first_of(cluster.settled(), signals.stop.wait())
                if not signals.stop.is_set():
                    notifier.ready()
                await signals.stop.wait()
                cluster.stopping = True
                ended = holds_for(DRAIN_CHECK_S, lambda: not cluster.live_requests)
                await drain(cluster, ended, signals, notifier, config.graceful_termination_timeout)
        except (OSError, SocketInUse) as error:
            raise CannotServe(f"cannot listen on {config.worker_socket}: {error}") from error
    log.info("stopped")
    return ExitCode.STOPPED
