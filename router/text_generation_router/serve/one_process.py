"""The whole router in one process."""

from text_generation_common.exit_codes import ExitCode
from text_generation_common.waiting import background
from text_generation_router.config import RouterConfig
from text_generation_router.rate_limits import RateLimits
from text_generation_router.serve.http import Backend, HttpSide, resolve_limits
from text_generation_router.serve.shards import Shards
from text_generation_router.shards.cluster import Cluster
from text_generation_router.stats import OwnStats


async def serve_alone(config: RouterConfig) -> ExitCode:
    """Serve HTTP in front of the shards until a stop signal. Raises CannotServe."""
    http = await HttpSide.start(config)
    shards = Shards(config)
    async with http.answering_probes(lambda: shards.reached):
        model = await shards.join(http.signals)
    if model is None:
        return ExitCode.STOPPED
    limits = resolve_limits(config, model)
    cluster: Cluster
    cluster, metrics, permits = shards.cluster(model)
    stats = OwnStats(metrics, cluster)

    async def run() -> None:
        async with background(stats.run(), shards.audit(stats.state.events)):
            await shards.drive(cluster)

    backend = Backend(cluster, permits, RateLimits(), stats, run)
    return await http.serve(model, limits, metrics, backend)
