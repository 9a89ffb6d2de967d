"""The end of a process that serves requests."""

from collections.abc import Coroutine
from typing import Any

from text_generation_common.log import log
from text_generation_common.notify import Notifier
from text_generation_common.stop_signals import StopSignals
from text_generation_common.waiting import first_of
from text_generation_router.cluster_interface import ClusterInterface
from text_generation_router.shards.cluster import Cluster


async def drain(
    cluster: ClusterInterface | Cluster[Any],
    ended: Coroutine[None, None, object],
    signals: StopSignals,
    notifier: Notifier,
    timeout_s: float,
) -> None:
    """Let requests finish until all have `ended`, for `timeout_s`, until a second signal or until no shard is left.

    Then fail the rest. New ones are refused meanwhile.
    """
    cluster.draining = True
    log.info("draining", requests=cluster.live_requests)
    notifier.stopping()
    await first_of(ended, signals.hurry.wait(), cluster.abandoned(), timeout_s=timeout_s)
    cluster.give_up("the server was stopped")
