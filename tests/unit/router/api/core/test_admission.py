"""Making requests of prompts and options."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from api_settings import api_metrics

from text_generation_proto.parameters import Api
from text_generation_proto.values import Sampling
from text_generation_router.admission_queue import PendingWork
from text_generation_router.api.core.admission import COUNTED_EXACTLY, RequestPreparer
from text_generation_router.api.core.parameters import GenerationOptions
from text_generation_router.api.core.settings import Limits
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import DEFAULT_TENANT, RequestId
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.text.tokenizer_pool import TokenizerPool

LIMITS = Limits(max_best_of=2, max_stop_sequences=4, max_top_n_tokens=5, max_input_tokens=100, max_total_tokens=200)

OPTIONS = GenerationOptions(Api.TGI)


@pytest.fixture
async def pool(demo_model: Path) -> AsyncIterator[TokenizerPool]:
    async with TokenizerPool(Tokenizer.load(demo_model), 1, PendingWork()) as started:
        yield started


def a_preparer(pool: TokenizerPool, limits: Limits = LIMITS) -> RequestPreparer:
    return RequestPreparer(pool, limits, api_metrics(), map(RequestId, count(1)))


async def test_truncate_keeps_the_last_tokens(pool: TokenizerPool) -> None:
    preparer = a_preparer(pool)
    [whole] = await preparer.prepare("one two three four", OPTIONS)
    [cut] = await preparer.prepare("one two three four", replace(OPTIONS, truncate=2))
    assert cut.prompt == whole.prompt[-2:]
    assert cut.max_new_tokens == 198


async def test_the_tokens_before_several_endings_of_a_prompt_are_counted(pool: TokenizerPool) -> None:
    preparer = a_preparer(pool)
    [request] = await preparer.prepare("one two kindnesses", OPTIONS)
    assert [await pool.decode([token]) for token in request.prompt] == ["one", " two", " kindness", "es"]
    assert [await preparer.tokens_before(ending, request) for ending in ("", "es", " two kindnesses", "es")] == [
        4,
        3,
        1,
        3,
    ]
    # A token lies across the start of this one.
    assert await preparer.tokens_before("ses", request) == 2


async def test_bad_words_are_read_as_tokens_alone_and_after_a_space(pool: TokenizerPool) -> None:
    options = replace(OPTIONS, bad_words=("Hello", " there now", "(", "Hello"))
    [request] = await a_preparer(pool).prepare("x", options)
    read = [await pool.decode(word, DEFAULT_TENANT) for word in request.sampling.bad_words]
    assert read == ["Hello", " Hello", "there now", " there now", "(", " ("]
    with pytest.raises(InvalidRequest, match="`bad_words` supports up to 256 words of 4096 tokens in all"):
        await a_preparer(pool).prepare("x", replace(OPTIONS, bad_words=("a b c d " * 600,)))


async def test_a_huge_text_is_refused_after_a_prefix(pool: TokenizerPool) -> None:
    with pytest.raises(InvalidRequest, match=r"Given: at least \d+ `inputs` tokens and 7 `max_new_tokens`"):
        await a_preparer(pool).prepare(" the" * COUNTED_EXACTLY, replace(OPTIONS, max_new_tokens=7))
    [request] = await a_preparer(pool).prepare(" the" * COUNTED_EXACTLY, replace(OPTIONS, truncate=3))
    assert len(request.prompt) == 3


async def test_the_seeds_of_several_answers_follow_from_the_first(pool: TokenizerPool) -> None:
    for given in (2**64 - 1, None):
        options = replace(OPTIONS, sampling=Sampling(greedy=False, seed=given))
        requests = await a_preparer(pool).prepare("Hello", options, count=3)
        first = requests[0].sampling.seed
        assert first == given if given else first is not None
        assert [request.sampling.seed for request in requests] == [(first + n) % 2**64 for n in range(3)]
        assert len({request.id for request in requests}) == 3
        assert len({id(request.prompt) for request in requests}) == 1


async def test_no_seed_is_drawn_if_the_engine_takes_none(pool: TokenizerPool) -> None:
    limits = replace(LIMITS, unsupported={"seed": "no"})
    [request] = await a_preparer(pool, limits).prepare("Hello", OPTIONS)
    assert request.sampling.seed is None
    with pytest.raises(InvalidRequest, match="`seed` is not supported by this engine: no"):
        await a_preparer(pool, limits).prepare("Hello", replace(OPTIONS, sampling=Sampling(greedy=False, seed=0)))
