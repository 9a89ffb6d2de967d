"""Checks of new sequences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from text_generation_proto.values import MAX_LOGIT_BIAS, Grammar, GrammarKind, LogprobOptions, Sampling, Stopping
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import NewSequence, sequence_problem
from text_generation_shard.engines.echo import EchoEngine

INFO = EchoEngine.build(ShardConfig(engine="echo")).info
VALID = NewSequence(0, (1, 2, 3), Stopping(4))


def test_values_in_range_are_no_problem() -> None:
    sampling = Sampling(
        min_p=1.0,
        output_frequency_penalty=-2.0,
        output_presence_penalty=2.0,
        logit_bias_ids=(0, INFO.vocab_size - 1),
        logit_bias_values=(-100.0, 100.0),
    )
    stopping = Stopping(4, min_new_tokens=4)
    admission = replace(
        VALID, sampling=sampling, stopping=stopping, logprobs=LogprobOptions(prompt=True, prompt_top_n=20)
    )
    assert sequence_problem(VALID, INFO) is None
    assert sequence_problem(admission, INFO) is None


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        *((Sampling(min_p=value), "min_p") for value in (-0.1, 1.1, math.nan, math.inf)),
        *((Sampling(output_frequency_penalty=value), "output_frequency_penalty") for value in (-2.1, 2.1, math.nan)),
        *((Sampling(output_presence_penalty=value), "output_presence_penalty") for value in (-2.1, 2.1, math.nan)),
        *(
            (Sampling(logit_bias_ids=(1,), logit_bias_values=(value,)), "logit_bias values")
            for value in (-100.1, 100.1, math.nan, -math.inf)
        ),
        (Sampling(logit_bias_ids=(1, 2), logit_bias_values=(0.0,)), "differ in length"),
        (Sampling(logit_bias_ids=(INFO.vocab_size,), logit_bias_values=(0.0,)), "outside the vocabulary"),
        (
            Sampling(logit_bias_ids=(1,) * (MAX_LOGIT_BIAS + 1), logit_bias_values=(0.0,) * (MAX_LOGIT_BIAS + 1)),
            "at most 1024",
        ),
    ],
)
def test_sampling_out_of_range_is_reported_by_name(sampling: Sampling, words: str) -> None:
    problem = sequence_problem(replace(VALID, sampling=sampling), INFO)
    assert problem is not None
    assert words in problem


@pytest.mark.parametrize(
    ("admission", "words"),
    [
        (replace(VALID, stopping=Stopping(4, min_new_tokens=5)), "at most max_new_tokens"),
        (replace(VALID, logprobs=LogprobOptions(prompt_top_n=2)), "prompt logprobs only"),
        (replace(VALID, logprobs=LogprobOptions(prompt=True, prompt_top_n=21)), "prompt_top_n is at most 20"),
        (replace(VALID, grammar=Grammar(GrammarKind.REGEX, "a")), "serves no grammars"),
    ],
)
def test_other_problems_are_reported_by_name(admission: NewSequence, words: str) -> None:
    problem = sequence_problem(admission, INFO)
    assert problem is not None
    assert words in problem
