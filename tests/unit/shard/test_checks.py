"""Checks of new sequences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from checked_echo import CheckedEcho

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
from text_generation_shard.sequence_checks import sequence_problem

INFO = replace(CheckedEcho.build(ShardConfig(engine="echo")).info, max_sequence_length=64)
VALID = New(0, (1, 2, 3), Stopping(4))


def biased(ids: tuple[int, ...], values: tuple[float, ...]) -> Sampling:
    return Sampling(logit_bias_ids=ids, logit_bias_values=values)


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


SAMPLING = [
    *((Sampling(temperature=value), "temperature") for value in (0.0, math.nan)),
    (Sampling(top_p=0.0), "top_p"),
    (Sampling(repetition_penalty=-1.0), "repetition_penalty"),
    (Sampling(frequency_penalty=2.1), "frequency_penalty"),
    *((Sampling(min_p=value), "min_p") for value in (-0.1, 1.1, math.nan, math.inf)),
    *((Sampling(output_frequency_penalty=each), "output_frequency_penalty") for each in (-2.1, 2.1, math.nan)),
    *((Sampling(output_presence_penalty=each), "output_presence_penalty") for each in (-2.1, 2.1, math.nan)),
    *((biased((1,), (value,)), "logit_bias values") for value in (-100.1, 100.1, math.nan, -math.inf)),
    (biased((1, 2), (0.0,)), "differ in length"),
    (biased((INFO.vocab_size,), (0.0,)), "outside the vocabulary"),
    (biased((1,) * (MAX_LOGIT_BIAS + 1), (0.0,) * (MAX_LOGIT_BIAS + 1)), "at most 1024"),
    (Sampling(allowed_token_ids=(INFO.vocab_size,)), "outside the vocabulary"),
    (Sampling(allowed_token_ids=(1,) * (MAX_ALLOWED_TOKENS + 1)), "at most 16384"),
    (Sampling(bad_words=((1, INFO.vocab_size),)), "outside the vocabulary"),
    (Sampling(bad_words=((1,), ())), "the lengths of bad_words"),
    (Sampling(bad_words=((1,),) * (MAX_BAD_WORDS + 1)), "at most 256"),
    (Sampling(bad_words=((1,) * (MAX_BAD_WORD_TOKENS + 1),)), "at most 256 words of 4096 tokens"),
]
"""Sampling out of range, and words of the problem."""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slot": INFO.max_slots}, f"slot {INFO.max_slots} is not one of {INFO.max_slots}"),
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (INFO.vocab_size,)}, "a prompt token is outside the vocabulary"),
        ({"prediction": (INFO.vocab_size,)}, "a token is outside the vocabulary"),
        ({"prediction": (1,) * 65}, "the prediction is longer than a sequence"),
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
        *(({"sampling": sampling}, words) for sampling, words in SAMPLING),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_problem_of_a_sequence_is_reported_by_name(changes: dict[str, object], words: str) -> None:
    assert words in str(sequence_problem(replace(VALID, **changes), INFO))  # type: ignore[arg-type]


def test_lengths_of_bad_words_that_do_not_fit_are_refused() -> None:
    for ids, lengths in (([1, 2], [1]), ([1], [2]), ([], [1]), ([1], [])):
        sampling = sampling_from_pb(pb.Sampling(greedy=True, bad_word_ids=ids, bad_word_lengths=lengths))
        assert "the lengths of bad_words" in str(sequence_problem(replace(VALID, sampling=sampling), INFO))
