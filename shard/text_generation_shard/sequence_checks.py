"""The checks of new sequences that all engines share."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from text_generation_proto.values import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    SAMPLING_PARAMETERS,
    Sampling,
)
from text_generation_shard.engine import EngineInfo, Media, NewSequence, Orders

NO_BLOCKS = "the engine schedules for itself: it takes no KV blocks"
NO_PREFILL = "the engine schedules for itself: it takes no prefill orders"


def sequence_problem(sequence: NewSequence, info: EngineInfo) -> str | None:
    """Return the first problem of a sequence that no engine could compute; None if there is none."""
    return (
        _prompt_problem(sequence, info)
        or _media_problem(sequence.media, len(sequence.prompt) - sequence.generated_tokens, info.max_images)
        or _options_problem(sequence, info)
        or _range_problem(sequence.sampling)
        or _logit_bias_problem(sequence.sampling, info.vocab_size)
        or _tokens_problem(sequence.sampling, info.vocab_size)
    )


def meant_for_steps(orders: Orders) -> list[tuple[int, str]]:
    """Return (slot, problem) for all parts of `orders` that a self-scheduling engine does not take."""
    return [(slot, NO_BLOCKS) for slot, _ in orders.allocations] + [(slot, NO_PREFILL) for slot, _ in orders.prefill]


def _prompt_problem(sequence: NewSequence, info: EngineInfo) -> str | None:
    if not 0 <= sequence.slot < info.max_slots:
        return f"slot {sequence.slot} is not one of {info.max_slots}"
    if sequence.rank > info.ranks:
        return f"rank {sequence.rank} is not one of {info.ranks}"
    if not sequence.prompt:
        return "the prompt is empty"
    if np.asarray(sequence.prompt).max() >= info.vocab_size:
        return f"a prompt token is outside the vocabulary of {info.vocab_size}"
    if max(sequence.prediction, default=0) >= info.vocab_size or len(sequence.prediction) > info.max_sequence_length:
        return f"the prediction is longer than a sequence, or a token is outside the vocabulary of {info.vocab_size}"
    if not 0 <= sequence.computed_tokens < len(sequence.prompt):
        return "computed_tokens must leave at least one prompt token to compute"
    if sequence.computed_tokens > len(sequence.blocks) * info.block_size:
        return "computed_tokens do not fit in the blocks given"
    if not 0 <= sequence.generated_tokens < len(sequence.prompt):
        return "generated_tokens must leave at least one prompt token"
    if len(sequence.prompt) + sequence.stopping.max_new_tokens > info.max_sequence_length:
        return f"prompt and new tokens exceed the model's {info.max_sequence_length} positions"
    return None


def _options_problem(sequence: NewSequence, info: EngineInfo) -> str | None:
    if sequence.stopping.max_new_tokens < 1:
        return "max_new_tokens must be at least 1"
    if sequence.stopping.min_new_tokens > sequence.stopping.max_new_tokens and not sequence.logprobs.generated:
        return "min_new_tokens must be at most max_new_tokens"
    for name in ("top_n", "prompt_top_n"):
        if getattr(sequence.logprobs, name) > info.max_top_n_tokens:
            return f"{name} is at most {info.max_top_n_tokens}"
    if sequence.logprobs.prompt_top_n and not sequence.logprobs.prompt:
        return "prompt_top_n comes with prompt logprobs only"
    if sequence.logprobs.generated and not info.scores_generated:
        return "the engine does not score generated tokens"
    if sequence.logprobs.generated and sequence.computed_tokens >= len(sequence.prompt) - sequence.generated_tokens:
        return "computed_tokens must leave the generated tokens of a replay to score"
    if sequence.grammar is not None and not info.grammar_kinds:
        return "the engine serves no grammars"
    if sequence.adapter and sequence.adapter not in info.adapters:
        return "the engine does not hold its LoRA adapter"
    return None


def _media_problem(media: Sequence[Media], prompt: int, most: int) -> str | None:
    """Return the first problem of the images of a prompt of so many tokens, of which at most `most` are served; None if there is none."""
    if len(media) > most:
        return f"a prompt has at most {most} images" if most else "the model takes no images"
    at = 0
    for each in media:
        if each.tokens < 1 or each.offset < at or each.end > prompt:
            return "the images of the prompt do not lie in it one after the other"
        at = each.end
    return None


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
