"""How a request is sampled and stopped. 1.2.1: sampling_params.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from trtllm_standin.logits import BatchedLogitsProcessor, LogitsProcessor
from trtllm_standin.sampling import GuideMethods, SamplingMethods

if TYPE_CHECKING:
    import torch

__all__ = ["BatchedLogitsProcessor", "GuidedDecodingParams", "LogitsProcessor", "SamplingParams"]


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
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[str] | None = None
    _context_logits_auto_enabled: bool = False
    _generation_logits_auto_enabled: bool = False
    _return_log_probs: bool = False
    lookahead_config: Any = None
    guided_decoding: GuidedDecodingParams | None = None
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
        # True becomes 1; and 0, which asks for nothing, stays 0.
        self.logprobs = self.logprobs and int(self.logprobs)
        self.prompt_logprobs = self.prompt_logprobs and int(self.prompt_logprobs)
