"""Places in the building, and texts too long to be counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from text_generation_router.api.core.admission import COUNTED_EXACTLY, Permits, RequestPreparer
from text_generation_router.api.core.parameters import GenerateParameters
from text_generation_router.api.core.settings import Limits
from text_generation_router.errors import InvalidRequest, Overloaded
from text_generation_router.metrics import Metrics
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.text.tokenizer import Tokenizer

LIMITS = Limits(max_best_of=2, max_stop_sequences=4, max_top_n_tokens=5, max_input_tokens=100, max_total_tokens=200)


def an_admission(demo_model: Path) -> RequestPreparer:
    scheduler = Scheduler(Policy(1, 1))
    metrics = Metrics(max_input_tokens=100, max_total_tokens=200, scheduler=scheduler)
    return RequestPreparer(Tokenizer.load(demo_model, workers=1), LIMITS, metrics)


def test_places_are_given_back_after_a_failure() -> None:
    permits = Permits(2)
    with pytest.raises(ZeroDivisionError), permits.take(2):
        raise ZeroDivisionError
    assert permits.in_use == 0


def test_as_many_places_as_asked_for_or_none() -> None:
    permits = Permits(2)
    with permits.take(1):
        with pytest.raises(Overloaded, match="Model is overloaded"), permits.take(2):
            pass
        assert permits.in_use == 1


async def test_truncate_keeps_the_last_tokens(demo_model: Path) -> None:
    admission = an_admission(demo_model)
    whole = await admission.admit("one two three four", GenerateParameters())
    cut = await admission.admit("one two three four", GenerateParameters(truncate=2))
    assert cut.prompt == whole.prompt[-2:]
    assert cut.max_new_tokens == 198


async def test_each_request_has_a_number_and_a_seed_of_its_own(demo_model: Path) -> None:
    admission = an_admission(demo_model)
    first = await admission.admit("Hello", GenerateParameters(do_sample=True))
    second = admission.another(first, 1)
    assert first.id != second.id
    assert first.sampling.seed != second.sampling.seed
    assert first.prompt == second.prompt


async def test_a_text_of_ordinary_length_is_counted_exactly(demo_model: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"Given: 201 `inputs` tokens and 0 `max_new_tokens`"):
        await an_admission(demo_model).admit(" the" * 201, GenerateParameters())


async def test_a_huge_text_is_refused_by_its_beginning(demo_model: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"Given: at least \d+ `inputs` tokens and 7 `max_new_tokens`"):
        await an_admission(demo_model).admit(" the" * COUNTED_EXACTLY, GenerateParameters(max_new_tokens=7))


async def test_a_huge_text_that_is_to_be_truncated_is_welcome(demo_model: Path) -> None:
    request = await an_admission(demo_model).admit(" the" * COUNTED_EXACTLY, GenerateParameters(truncate=3))
    assert len(request.prompt) == 3
