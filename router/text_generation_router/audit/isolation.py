"""Isolation: a feature under suspicion is switched off, where the router can do without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from text_generation_router.shards.cluster import Cluster


def isolate(cluster: Cluster[Any], feature: str) -> str | None:
    """Do without a feature, or a replica, until the router restarts. Return what was done; None if it cannot be done."""
    scheduler = cluster.scheduler
    if feature == "prefix":
        scheduler.policy = replace(scheduler.policy, prefix_caching=False)
        for replica in scheduler.serving:
            replica.reuses_prefixes = False
            replica.cache.stop_caching()
        return "no prefix is reused any more"
    if feature.startswith("replica ") and cluster.release_replica(int(feature.removeprefix("replica "))):
        return f"{feature} gets no requests any more"
    return None
