"""An HTTP worker: HTTP and text, in front of the scheduler process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from text_generation_proto.exit_codes import ExitCode
from text_generation_router.config import RouterConfig
from text_generation_router.front.remote_cluster import RemoteCluster
from text_generation_router.front.remote_permits import RemotePermits
from text_generation_router.metrics import Metrics
from text_generation_router.serve.http import HttpSide
from text_generation_router.serve.limits import resolve_limits
from text_generation_router.shards.join import ReplicaInfo


async def serve_as_worker(config: RouterConfig) -> ExitCode:
    """Serve HTTP until a stop signal. Raises CannotServe."""
    http = await HttpSide.start(config)
    cluster = RemoteCluster(Path(config.front_socket), config.http_worker, {})
    async with http.answering_probes():
        model = await _join(http, cluster)
    if model is None:
        return ExitCode.STOPPED
    limits = resolve_limits(config, model)
    metrics = Metrics(
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        scheduler=None,
        log_drops_fd=config.log_drops_fd,
    )
    permits = RemotePermits(config.max_concurrent_requests, cluster)
    return await http.serve(model, limits, cluster, permits, metrics, cluster.run)


async def _join(http: HttpSide, cluster: RemoteCluster) -> ReplicaInfo | None:
    """Connect to the scheduler process. Return what its shards serve; None after a stop signal."""
    async with asyncio.TaskGroup() as tasks:
        joining = tasks.create_task(cluster.joined())
        stopping = tasks.create_task(http.signals.stop.wait())
        await asyncio.wait((joining, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not joining.done():
            joining.cancel()
            return None
    return joining.result()
