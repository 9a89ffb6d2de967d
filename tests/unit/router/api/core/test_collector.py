"""The rank of the sequences of `best_of`."""

from __future__ import annotations

import math

import pytest

from text_generation_router.api.core.serving import Collector
from text_generation_router.generation import TokenOutput
from text_generation_router.request import Request, RequestId


def collected(*logprobs: bytes) -> Collector:
    collector = Collector(Request(RequestId(1), (1,), max_new_tokens=9), most_logprobs=9)
    for logprob in logprobs:
        collector.on_output(TokenOutput(1, 7, "a", "a", logprob, special=False, top=(), ending=None))
    return collector


async def test_tokens_with_an_unknown_logprob_do_not_count() -> None:
    assert collected(b"-0.5", b"null", b"-1.5", b"null").mean_logprob == pytest.approx(-1.0)
    ends_unknown, worse = collected(b"-0.25", b"null"), collected(b"-0.5", b"-0.5")
    assert max((worse, ends_unknown), key=lambda collector: collector.mean_logprob) is ends_unknown


async def test_a_sequence_without_a_known_logprob_ranks_last() -> None:
    assert collected(b"null", b"null").mean_logprob == -math.inf
