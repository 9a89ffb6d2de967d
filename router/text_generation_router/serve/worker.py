"""An HTTP worker: HTTP and text, in front of the scheduler process."""

from pathlib import Path

from text_generation_common.exit_codes import ExitCode
from text_generation_common.waiting import unless_stopped
from text_generation_router.config import RouterConfig
from text_generation_router.errors import Unhealthy
from text_generation_router.metrics import HttpMetrics
from text_generation_router.serve.http import Backend, HttpSide, resolve_limits
from text_generation_router.serve.shards import reached_file
from text_generation_router.stats import COUNTS
from text_generation_router.stats.remote import RemoteStats
from text_generation_router.worker_link.remote_cluster import RemoteCluster
from text_generation_router.worker_link.remote_limits import RemotePermits, RemoteRates


async def serve_as_worker(config: RouterConfig) -> ExitCode:
    """Serve HTTP until a stop signal. Raises CannotServe."""
    http = await HttpSide.start(config)
    metrics: HttpMetrics | None = None

    async def counts() -> bytes:
        if metrics is None:
            raise Unhealthy("the worker starts")
        return metrics.snapshot()

    cluster = RemoteCluster(Path(config.worker_socket), config.http_worker, {COUNTS: counts})
    async with http.answering_probes(reached_file(config).exists):
        model = await unless_stopped(cluster.link.joined(), http.signals)
    if model is None:
        return ExitCode.STOPPED
    limits = resolve_limits(config, model)
    metrics = HttpMetrics(max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens)
    link = cluster.link
    permits = RemotePermits(config.max_concurrent_requests, link)
    backend = Backend(cluster, permits, RemoteRates(link), RemoteStats(link), cluster.run)
    return await http.serve(model, limits, metrics, backend)
