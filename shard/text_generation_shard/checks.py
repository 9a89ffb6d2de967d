"""Whether an admission asks what the engine can do: every number in its range, in words for whoever sent it."""

from __future__ import annotations

from text_generation_proto.values import LOGIT_BIAS, MAX_LOGIT_BIAS, SAMPLING_PARAMETERS, Sampling, Stopping
from text_generation_shard.engine import EngineInfo, NewSequence, Orders

NO_BLOCKS = "the engine schedules for itself: it takes no KV blocks"
NO_PREFILL = "the engine schedules for itself: it takes no prefill orders"


def admission_problem(admission: NewSequence, info: EngineInfo) -> str | None:
    """What is wrong with `admission` by itself; None if nothing is."""
    return (
        _prompt_problem(admission, info)
        or _stopping_problem(admission.stopping)
        or _asked_problem(admission, info)
        or _sampling_problem(admission.sampling)
        or _logit_bias_problem(admission.sampling, info)
    )


def meant_for_steps(orders: Orders) -> list[tuple[int, str]]:
    """(slot, what is wrong) of all in `orders` that an engine which schedules for itself decides alone."""
    return [(slot, NO_BLOCKS) for slot, _ in orders.grants] + [(slot, NO_PREFILL) for slot, _ in orders.prefill]


def _prompt_problem(admission: NewSequence, info: EngineInfo) -> str | None:
    if not 0 <= admission.slot < info.max_slots:
        return f"slot {admission.slot} is not one of {info.max_slots}"
    if not admission.prompt:
        return "the prompt is empty"
    if max(admission.prompt) >= info.vocab_size:
        return f"a prompt token is outside the vocabulary of {info.vocab_size}"
    if not 0 <= admission.computed_tokens < len(admission.prompt):
        return "computed_tokens must leave at least one prompt token to compute"
    if admission.computed_tokens > len(admission.blocks) * info.block_size:
        return "computed_tokens do not fit in the blocks given"
    if not 0 <= admission.generated_tokens < len(admission.prompt):
        return "generated_tokens must leave at least one prompt token"
    if len(admission.prompt) + admission.stopping.max_new_tokens > info.max_sequence_length:
        return f"prompt and new tokens exceed the model's {info.max_sequence_length} positions"
    return None


def _stopping_problem(stopping: Stopping) -> str | None:
    if stopping.max_new_tokens < 1:
        return "max_new_tokens must be at least 1"
    if stopping.min_new_tokens > stopping.max_new_tokens:
        return "min_new_tokens must be at most max_new_tokens"
    return None


def _asked_problem(admission: NewSequence, info: EngineInfo) -> str | None:
    if admission.logprobs.top_n > info.max_top_n_tokens:
        return f"top_n is at most {info.max_top_n_tokens}"
    if admission.logprobs.prompt_top_n > info.max_top_n_tokens:
        return f"prompt_top_n is at most {info.max_top_n_tokens}"
    if admission.logprobs.prompt_top_n and not admission.logprobs.prompt:
        return "prompt_top_n comes with prompt logprobs only"
    if admission.grammar is not None and not info.grammar_kinds:
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
