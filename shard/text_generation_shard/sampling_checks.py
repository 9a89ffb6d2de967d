"""The checks of the sampling parameters of a new sequence."""

from itertools import chain

from text_generation_proto.values import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    SAMPLING_PARAMETERS,
    Sampling,
)


def sampling_problem(sampling: Sampling, vocab_size: int) -> str | None:
    return (
        _range_problem(sampling) or _logit_bias_problem(sampling, vocab_size) or _tokens_problem(sampling, vocab_size)
    )


def _range_problem(sampling: Sampling) -> str | None:
    for parameter in SAMPLING_PARAMETERS:
        if parameter.range is not None and not parameter.allows(getattr(sampling, parameter.field)):
            return f"{parameter.field} {parameter.range.rule}"
    return None


def _tokens_problem(sampling: Sampling, vocab_size: int) -> str | None:
    if len(sampling.allowed_token_ids) > MAX_ALLOWED_TOKENS:
        return f"allowed_token_ids has at most {MAX_ALLOWED_TOKENS} tokens"
    if len(sampling.bad_words) > MAX_BAD_WORDS or sum(map(len, sampling.bad_words)) > MAX_BAD_WORD_TOKENS:
        return f"bad_words has at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_TOKENS} tokens in all"
    if not all(sampling.bad_words):
        return "the lengths of bad_words are 0 or do not fit its tokens"
    if max((*sampling.allowed_token_ids, *chain.from_iterable(sampling.bad_words)), default=0) >= vocab_size:
        return f"a token of allowed_token_ids or bad_words is outside the vocabulary of {vocab_size}"
    return None


def _logit_bias_problem(sampling: Sampling, vocab_size: int) -> str | None:
    ids, values = sampling.logit_bias_ids, sampling.logit_bias_values
    if len(ids) != len(values):
        return "logit_bias_ids and logit_bias_values differ in length"
    if len(ids) > MAX_LOGIT_BIAS:
        return f"logit_bias names at most {MAX_LOGIT_BIAS} tokens"
    if ids and max(ids) >= vocab_size:
        return f"a logit_bias token is outside the vocabulary of {vocab_size}"
    if not all(value in LOGIT_BIAS for value in values):
        return f"logit_bias values {LOGIT_BIAS.rule}"
    return None
