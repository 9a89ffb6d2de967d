"""The prefixes that are worth their place in the host cache.

Stores are made ahead, when a sequence ends, so that a block is there when its device evicts it or dies. While the cache has free
blocks, each prefix is stored. Once a store evicts another one, only prefixes of sessions are: those of a job that a client names or that
an earlier prompt began, and those that continue a cached prefix.
"""

from text_generation_router.scheduling.chunking import MIN_SHARED_TOKENS
from text_generation_router.scheduling.jobs import own_job
from text_generation_router.scheduling.sequence import ScheduledSequence

MIN_LOADED_TOKENS = MIN_SHARED_TOKENS
"""Tokens by which a prefix on the host is longer than that on the device, so that it is loaded; fewer are computed, unless the
sequence went on elsewhere before."""


def worth_storing(sequence: ScheduledSequence, *, has_room: bool) -> bool:
    """Return True if the prefix of a sequence that ends is worth storing; `has_room`: nothing is evicted for it."""
    is_session = sequence.job not in ("", own_job(sequence))
    return has_room or is_session or sequence.cached_tokens >= MIN_SHARED_TOKENS
