"""Checks of a whole scheduler, from its public interface."""

from __future__ import annotations

from text_generation_router.scheduling.scheduler import Scheduler


def assert_idle(scheduler: Scheduler) -> None:
    """Assert that no request is left in the queue, in a tenant's account or on a replica."""
    scheduler.check_invariants()
    stats = scheduler.stats()
    assert (stats.waiting, stats.queued_tokens, stats.running, stats.promised_tokens, stats.kv_usage) == (0,) * 5
    assert not scheduler.requests
    assert scheduler.next_expiry is None
    for replica in scheduler.replicas.values():
        if replica is not None:
            assert (replica.work, replica.prompts.unscheduled, replica.prompts.uncomputed) == (0, 0, 0)
