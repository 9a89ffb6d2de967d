"""Where the buckets of the histograms end. TGI's are those of its exporter (router/src/server.rs)."""

from __future__ import annotations

DURATION_BUCKETS = tuple(0.0001 * 1.5**k for k in range(1, 36))
"""TGI's, for every name that ends in `duration`. Seconds: 0.15 ms to 146 s."""

BATCH_SIZE_BUCKETS = tuple(range(1, 1025))
"""TGI's: one a size."""

SKIPPED_TOKENS_BUCKETS = tuple(range(17))
"""Ours: to TGI this is a summary, though its board asks for buckets."""

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
"""Seconds. Fine around the usual targets, and long enough for a queue."""

TOKEN_GAP_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Seconds. Past a tenth something stood still: a long prompt, a full KV cache, a preemption."""


def token_buckets(largest: int) -> tuple[float, ...]:
    """TGI's for counts of tokens: a hundred equal steps up to the limit."""
    return tuple(largest / 100 * step for step in range(1, 101))
