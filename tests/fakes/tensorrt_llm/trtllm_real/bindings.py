"""Classes that the library has in C++: requests and their configurations, reasons for an end, responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar


class FinishReason(Enum):
    """The reason why a sequence ended."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class RequestType(Enum):
    """The phases that an engine computes."""

    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    REQUEST_TYPE_CONTEXT_ONLY = 1
    REQUEST_TYPE_GENERATION_ONLY = 2


class _Keywords:
    """An object with the keywords it is made of; those that the class lists have None as default."""

    def __init__(self, **keywords: object) -> None:
        vars(self).update(keywords)


class SamplingConfig(_Keywords):
    """Its fields are read with `dir`."""

    top_k = top_p = top_p_min = top_p_reset_ids = top_p_decay = seed = temperature = min_tokens = None
    beam_search_diversity_rate = repetition_penalty = presence_penalty = frequency_penalty = length_penalty = None
    early_stopping = no_repeat_ngram_size = min_p = beam_width_array = num_return_sequences = beam_width = None


class OutputConfig(_Keywords):
    """Its fields are read with `dir`."""

    return_log_probs = return_context_logits = return_generation_logits = exclude_input_from_output = None
    return_encoder_output = return_perf_metrics = additional_model_outputs = None


class Request(_Keywords):
    """A request as the engine gets it. Its fields: those that base_worker.py passes."""

    BATCHED_POST_PROCESSOR_NAME: ClassVar = "batched"
    py_num_logprobs: int | None = None
    py_arrival_time: object = None


class LoraConfig(_Keywords):
    """The adapter of a request."""


class KvCacheRetentionConfig(_Keywords):
    """The retention of the blocks of a request."""


class Executor:
    """The engine in C++, which is not here."""


class GuidedDecodingParams:
    """The guide of a request."""

    class GuideType(Enum):
        """Values: the fields of the GuidedDecodingParams in sampling_params.py."""

        JSON = "json_object"
        JSON_SCHEMA = "json"
        REGEX = "regex"
        EBNF_GRAMMAR = "grammar"
        STRUCTURAL_TAG = "structural_tag"

    def __init__(self, guide_type: GuideType, guide: str = "") -> None:
        self.guide_type, self.guide = guide_type, guide


@dataclass(slots=True)
class Result:
    """The output of a step for one sequence."""

    is_final: bool
    output_token_ids: list[list[int]]
    """The tokens of this step."""
    finish_reasons: list[FinishReason]
    log_probs: list[list[dict[int, Any]]] | None
    """The entries of all tokens so far."""
    cached_tokens: int
    decoding_iter: int
    avg_decoded_tokens_per_iter: float | None = None
    sequence_index: int = 0
    cum_log_probs: list[float] | None = None
    context_logits: Any = None
    generation_logits: Any = None
    context_phase_params: None = None
    request_perf_metrics: None = None


@dataclass(slots=True)
class Response:
    """A response of the engine: a result or an error. The library's PyTorch engine has LlmResponse with the same names."""

    client_id: int
    request_id: int
    result: Result | None = None
    error_msg: str = ""
    _unused: None = field(default=None, repr=False)

    def has_error(self) -> bool:
        """True if the request failed."""
        return bool(self.error_msg)

    def clear_context_logits(self) -> None:
        """There are none."""
