"""OutputLengths: how many new tokens a request will probably take of those it asked for."""

from __future__ import annotations

_USUAL_SHARE = 0.5
"""What is assumed before anything ended."""
_USUAL_WEIGHT = 2
"""How many endings that is worth."""
_MEMORY = 50
"""Endings over which the mean is taken."""
_BUCKETS = 33


class OutputLengths:
    """Mean share of `max_new_tokens` that requests generate.

    Clients that ask for 20 tokens use them; clients that leave the default of 2048 stop long before. So requests count
    by the power of two that their limit fits under, and a power not seen yet starts from the nearest one that was.
    """

    def __init__(self) -> None:
        self._shares = [_USUAL_SHARE] * _BUCKETS
        self._ended = [0] * _BUCKETS

    def expected(self, max_new_tokens: int) -> int:
        """New tokens to expect of a request with this limit: at least one, at most the limit."""
        share = self._share(_bucket(max_new_tokens))
        return max(1, min(round(share * max_new_tokens), max_new_tokens))

    def ended(self, max_new_tokens: int, generated: int) -> None:
        """A request generated so many tokens and ended by itself or by its limit, not by cancellation or failure."""
        if max_new_tokens < 1:
            return
        bucket = _bucket(max_new_tokens)
        share = self._share(bucket)
        used = min(max(generated, 0) / max_new_tokens, 1.0)
        self._ended[bucket] += 1
        # A plain mean while there is little to take it over.
        self._shares[bucket] = share + (used - share) / min(self._ended[bucket] + _USUAL_WEIGHT, _MEMORY)

    def _share(self, bucket: int) -> float:
        """The share of this bucket, or of the nearest with an ending; of two as near, the one of smaller limits."""
        for distance in range(_BUCKETS):
            for near in (bucket - distance, bucket + distance):
                if 0 <= near < _BUCKETS and self._ended[near]:
                    return self._shares[near]
        return _USUAL_SHARE


def _bucket(max_new_tokens: int) -> int:
    """n for limits in (2^(n-1), 2^n]."""
    return min(max(max_new_tokens - 1, 0).bit_length(), _BUCKETS - 1)
