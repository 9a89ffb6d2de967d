"""How a request is sampled and stopped. Main at 1.3.0rc28: sampling_params.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from trtllm_standin.logits import BatchedLogitsProcessor, LogitsProcessor
from trtllm_standin.sampling import GuideMethods, SamplingMethods

if TYPE_CHECKING:
    import torch

__all__ = ["BatchedLogitsProcessor", "GuidedDecodingParams", "LogitsProcessor", "LogprobMode", "SamplingParams"]
MAX_TOP_LOGPROBS = 20


class LogprobMode(Enum):
    """Before or after temperature and penalties."""

    RAW = "raw"
    PROCESSED = "processed"


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams(GuideMethods):
    """What an answer has to keep to: one of these, if any."""

    json: str | BaseModel | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass(slots=True, kw_only=True)
class SamplingParams(SamplingMethods):
    """All keyword-only, in slots: an unknown keyword is a TypeError, an unknown attribute an AttributeError."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: torch.Tensor | None = None
    logits_processor: LogitsProcessor | list[LogitsProcessor] | None = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    logprobs_mode: LogprobMode = LogprobMode.RAW
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_simple_format: bool = False
    prompt_logprobs_simple_format: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[str] | None = None
    _context_logits_auto_enabled: bool = False
    _generation_logits_auto_enabled: bool = False
    _return_log_probs: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    thinking_token_budget: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    _bad_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    _stop_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    _stream_interval: int | None = field(default=None, init=False, repr=False)

    def _validate(self) -> None:
        super(SamplingParams, self)._validate()
        self.logprobs = _top(self.logprobs, "logprobs")
        self.prompt_logprobs = _top(self.prompt_logprobs, "prompt_logprobs")
        if self.logprobs_simple_format and (self.logprobs != 0 or self.use_beam_search):
            raise ValueError("logprobs_simple_format requires logprobs=0 and no beam search")
        if self.prompt_logprobs_simple_format and self.prompt_logprobs != 0:
            raise ValueError("prompt_logprobs_simple_format requires prompt_logprobs=0")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"require 0 <= min_p <= 1, got min_p={self.min_p}")
        budget = self.thinking_token_budget
        if budget is not None and budget < -1:
            raise ValueError(f"thinking_token_budget must be None, -1 or not negative, got {budget}")
        for name in ("top_p_min", "top_p_decay"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"require 0 < {name} <= 1, got {name}={value}")

    @property
    def _greedy_decoding(self) -> bool:
        """docs/source/features/sampling.md: min_p or top_p_decay at work makes it sampling though nothing else is set;
        min_p of 1 leaves only the most probable token."""
        if self.min_p == 1 and not self.use_beam_search:
            return True
        nothing_set = self.temperature is None and self.top_p is None and self.top_k is None
        is_at_work = bool(self.min_p) or (self.top_p_decay is not None and self.top_p_decay < 1)
        return super(SamplingParams, self)._greedy_decoding and not (nothing_set and is_at_work)


def _top(wanted: int | None, name: str) -> int | None:
    """True asks for the chosen token's alone, False for none."""
    if isinstance(wanted, bool):
        return 0 if wanted else None
    if wanted is not None and not 0 <= wanted <= MAX_TOP_LOGPROBS:
        raise ValueError(f"{name} must be between 0 and {MAX_TOP_LOGPROBS}, got {wanted}")
    return wanted
