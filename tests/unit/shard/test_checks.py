"""Checks of new sequences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from text_generation_proto.convert import sampling_from_pb
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    Grammar,
    GrammarKind,
    LogprobOptions,
    Sampling,
    Stopping,
)
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import NewSequence as New
from text_generation_shard.engine import sequence_problem
from text_generation_shard.engines.echo import EchoEngine

INFO = replace(EchoEngine.build(ShardConfig(engine="echo")).info, max_sequence_length=64)
VALID = New(0, (1, 2, 3), Stopping(4))


def test_values_in_range_are_no_problem() -> None:
    sampling = Sampling(
        min_p=1.0,
        output_frequency_penalty=-2.0,
        output_presence_penalty=2.0,
        logit_bias_ids=(0, INFO.vocab_size - 1),
        logit_bias_values=(-100.0, 100.0),
        allowed_token_ids=(0, INFO.vocab_size - 1),
        bad_words=((0,), (1, INFO.vocab_size - 1)),
    )
    logprobs = LogprobOptions(prompt=True, prompt_top_n=20)
    for new in (VALID, New(0, (1, 2, 3), Stopping(61, min_new_tokens=61), sampling, logprobs=logprobs)):
        assert sequence_problem(new, INFO) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slot": INFO.max_slots}, f"slot {INFO.max_slots} is not one of {INFO.max_slots}"),
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (INFO.vocab_size,)}, "a prompt token is outside the vocabulary"),
        ({"computed_tokens": 3, "blocks": (7,)}, "at least one prompt token to compute"),
        ({"computed_tokens": 1}, "do not fit in the blocks"),
        ({"generated_tokens": 3}, "generated_tokens must leave at least one"),
        ({"stopping": Stopping(0)}, "max_new_tokens must be at least 1"),
        ({"stopping": Stopping(62)}, "exceed the model's 64 positions"),
        ({"stopping": Stopping(4, min_new_tokens=5)}, "at most max_new_tokens"),
        ({"logprobs": LogprobOptions(21)}, "top_n is at most 20"),
        ({"logprobs": LogprobOptions(prompt_top_n=2)}, "prompt logprobs only"),
        ({"logprobs": LogprobOptions(prompt=True, prompt_top_n=21)}, "prompt_top_n is at most 20"),
        ({"grammar": Grammar(GrammarKind.REGEX, "a")}, "serves no grammars"),
    ],
)
def test_a_problem_of_a_sequence_is_reported_by_name(changes: dict[str, object], words: str) -> None:
    assert words in str(sequence_problem(replace(VALID, **changes), INFO))  # type: ignore[arg-type]


def test_a_model_with_states_starts_no_sequence_on_cached_blocks() -> None:
    new = replace(VALID, computed_tokens=1, blocks=(7,))
    assert sequence_problem(new, INFO) is None
    assert "computed_tokens must be 0" in str(sequence_problem(new, replace(INFO, keeps_states=True)))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (0.0, math.nan)),
        ("top_p", (0.0,)),
        ("repetition_penalty", (-1.0,)),
        ("frequency_penalty", (2.1,)),
        ("min_p", (-0.1, 1.1, math.nan, math.inf)),
        ("output_frequency_penalty", (-2.1, 2.1, math.nan)),
        ("output_presence_penalty", (-2.1, 2.1, math.nan)),
    ],
)
def test_sampling_out_of_range_is_reported_by_name(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        sampling = Sampling(**{name: value})  # type: ignore[arg-type]
        assert str(sequence_problem(replace(VALID, sampling=sampling), INFO)).startswith(name)


@pytest.mark.parametrize(
    ("ids", "values", "words"),
    [
        *(((1,), (value,), "logit_bias values") for value in (-100.1, 100.1, math.nan, -math.inf)),
        ((1, 2), (0.0,), "differ in length"),
        ((INFO.vocab_size,), (0.0,), "outside the vocabulary"),
        ((1,) * (MAX_LOGIT_BIAS + 1), (0.0,) * (MAX_LOGIT_BIAS + 1), "at most 1024"),
    ],
)
def test_problems_of_a_logit_bias(ids: tuple[int, ...], values: tuple[float, ...], words: str) -> None:
    sampling = Sampling(logit_bias_ids=ids, logit_bias_values=values)
    assert words in str(sequence_problem(replace(VALID, sampling=sampling), INFO))


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(allowed_token_ids=(INFO.vocab_size,)), "outside the vocabulary"),
        (Sampling(allowed_token_ids=(1,) * (MAX_ALLOWED_TOKENS + 1)), "at most 16384"),
        (Sampling(bad_words=((1, INFO.vocab_size),)), "outside the vocabulary"),
        (Sampling(bad_words=((1,), ())), "the lengths of bad_words"),
        (Sampling(bad_words=((1,),) * (MAX_BAD_WORDS + 1)), "at most 256"),
        (Sampling(bad_words=((1,) * (MAX_BAD_WORD_TOKENS + 1),)), "at most 256 words of 4096 tokens"),
    ],
)
def test_problems_of_allowed_and_banned_tokens(sampling: Sampling, words: str) -> None:
    assert words in str(sequence_problem(replace(VALID, sampling=sampling), INFO))


def test_lengths_of_bad_words_that_do_not_fit_are_refused() -> None:
    for ids, lengths in (([1, 2], [1]), ([1], [2]), ([], [1]), ([1], [])):
        sampling = sampling_from_pb(pb.Sampling(greedy=True, bad_word_ids=ids, bad_word_lengths=lengths))
        assert "the lengths of bad_words" in str(sequence_problem(replace(VALID, sampling=sampling), INFO))
