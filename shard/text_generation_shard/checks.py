"""Checks of new sequences and orders against the contract and the limits of the engine."""

from __future__ import annotations

from text_generation_proto.values import LOGIT_BIAS, MAX_LOGIT_BIAS, SAMPLING_PARAMETERS, Sampling, Stopping
from text_generation_shard.engine import EngineInfo, NewSequence, Orders

NO_BLOCKS = "the engine schedules for itself: it takes no KV blocks"
NO_PREFILL = "the engine schedules for itself: it takes no prefill orders"


def sequence_problem(sequence: NewSequence, info: EngineInfo) -> str | None:
    """Return the first problem of a new sequence, or None."""
    return (
        _prompt_problem(sequence, info)
        or _stopping_problem(sequence.stopping)
        or _options_problem(sequence, info)
        or _sampling_problem(sequence.sampling)
        or _logit_bias_problem(sequence.sampling, info)
    )


def meant_for_steps(orders: Orders) -> list[tuple[int, str]]:
    """Return (slot, problem) for all parts of `orders` that a self-scheduling engine does not take."""
    return [(slot, NO_BLOCKS) for slot, _ in orders.grants] + [(slot, NO_PREFILL) for slot, _ in orders.prefill]


def _prompt_problem(sequence: NewSequence, info: EngineInfo) -> str | None:
    if not 0 <= sequence.slot < info.max_slots:
        return f"slot {sequence.slot} is not one of {info.max_slots}"
    if not sequence.prompt:
        return "the prompt is empty"
    if max(sequence.prompt) >= info.vocab_size:
        return f"a prompt token is outside the vocabulary of {info.vocab_size}"
    if not 0 <= sequence.computed_tokens < len(sequence.prompt):
        return "computed_tokens must leave at least one prompt token to compute"
    if sequence.computed_tokens > len(sequence.blocks) * info.block_size:
        return "computed_tokens do not fit in the blocks given"
    if not 0 <= sequence.generated_tokens < len(sequence.prompt):
        return "generated_tokens must leave at least one prompt token"
    if len(sequence.prompt) + sequence.stopping.max_new_tokens > info.max_sequence_length:
        return f"prompt and new tokens exceed the model's {info.max_sequence_length} positions"
    return None


def _stopping_problem(stopping: Stopping) -> str | None:
    if stopping.max_new_tokens < 1:
        return "max_new_tokens must be at least 1"
    if stopping.min_new_tokens > stopping.max_new_tokens:
        return "min_new_tokens must be at most max_new_tokens"
    return None


def _options_problem(sequence: NewSequence, info: EngineInfo) -> str | None:
    if sequence.logprobs.top_n > info.max_top_n_tokens:
        return f"top_n is at most {info.max_top_n_tokens}"
    if sequence.logprobs.prompt_top_n > info.max_top_n_tokens:
        return f"prompt_top_n is at most {info.max_top_n_tokens}"
    if sequence.logprobs.prompt_top_n and not sequence.logprobs.prompt:
        return "prompt_top_n comes with prompt logprobs only"
    if sequence.grammar is not None and not info.grammar_kinds:
        return "the engine serves no grammars"
    return None


def _sampling_problem(sampling: Sampling) -> str | None:
    for parameter in SAMPLING_PARAMETERS:
        if parameter.range is not None and not parameter.allows(getattr(sampling, parameter.field)):
            return f"{parameter.field} {parameter.range.rule}"
    return None


def _logit_bias_problem(sampling: Sampling, info: EngineInfo) -> str | None:
    ids, values = sampling.logit_bias_ids, sampling.logit_bias_values
    if len(ids) != len(values):
        return "logit_bias_ids and logit_bias_values differ in length"
    if len(ids) > MAX_LOGIT_BIAS:
        return f"logit_bias names at most {MAX_LOGIT_BIAS} tokens"
    if ids and max(ids) >= info.vocab_size:
        return f"a logit_bias token is outside the vocabulary of {info.vocab_size}"
    if not all(value in LOGIT_BIAS for value in values):
        return f"logit_bias values {LOGIT_BIAS.rule}"
    return None
