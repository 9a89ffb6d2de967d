"""The whole router in one process."""

from __future__ import annotations

from functools import partial

from text_generation_proto.exit_codes import ExitCode
from text_generation_router.config import RouterConfig
from text_generation_router.metrics import Metrics
from text_generation_router.permits import Permits
from text_generation_router.serve.http import HttpSide
from text_generation_router.serve.limits import resolve_limits
from text_generation_router.serve.shards import Shards, new_scheduler
from text_generation_router.shards.cluster import Cluster


async def serve_alone(config: RouterConfig) -> ExitCode:
    """Serve HTTP in front of the shards until a stop signal. Raises CannotServe."""
    http = await HttpSide.start(config)
    shards = Shards(config)
    async with http.answering_probes():
        model = await shards.join(http.signals)
    if model is None:
        return ExitCode.STOPPED
    limits = resolve_limits(config, model)
    scheduler = new_scheduler(config, model)
    metrics = Metrics(
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        scheduler=scheduler,
        log_drops_fd=config.log_drops_fd,
    )
    cluster = Cluster(scheduler, metrics.steps, config.hang_timeout)
    metrics.add_shards(cluster)
    metrics.add_names(config.metric_names, config.model_id or config.model_path)
    permits = Permits(config.max_concurrent_requests, cluster.estimated_permit_wait)
    return await http.serve(model, limits, cluster, permits, metrics, partial(shards.drive, cluster))
