"""The time between a request's tokens, exact, at the price of a step and not of a token.

Requests that got a token in two steps running waited the same time for it: the time between the two reports. They are
counted together. Those left out of a step (no KV block to grow into, preempted) are remembered with the time of their
last token until they get another one, so the long gaps are measured too.
"""

from __future__ import annotations

from collections.abc import Container

from text_generation_router.metrics.buckets import TOKEN_GAP_BUCKETS
from text_generation_router.metrics.instruments import Histogram
from text_generation_router.request import RequestId


def gap_histogram() -> Histogram:
    """Where the gaps of all replicas are counted."""
    return Histogram(
        "text_generation_inter_token_seconds",
        "Seconds between two new tokens of a request, whatever it waited for; tokens of one step have none between",
        TOKEN_GAP_BUCKETS,
    )


class TokenGaps:
    """Who got tokens of one replica last, and when."""

    def __init__(self, histogram: Histogram) -> None:
        self.histogram = histogram
        self._previous: set[RequestId] = set()
        self._at = 0.0
        self._left_out: dict[RequestId, float] = {}
        """When requests that are still going on, but not in the last step, got their last token."""

    def step(self, now: float, served: set[RequestId], alive: Container[RequestId]) -> None:
        """A step brought new tokens to `served`, which must not be changed any more; others may have ended since."""
        if together := len(served & self._previous):
            self.histogram.observe(now - self._at, together)
        if self._left_out:
            self._welcome_back(now, served, alive)
        if together < len(self._previous):
            for request_id in self._previous - served:
                if request_id in alive:
                    self._left_out[request_id] = self._at
        self._previous, self._at = served, now

    def _welcome_back(self, now: float, served: set[RequestId], alive: Container[RequestId]) -> None:
        for request_id, at in list(self._left_out.items()):
            if request_id in served:
                self.histogram.observe(now - at)
            elif request_id in alive:
                continue
            del self._left_out[request_id]
