"""What a request may say beside its sampling: its prompt, and things that are known by their fields alone.

1.2.1: executor/request.py, disaggregated_params.py; nearest: inputs/data.py, scheduling_params.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text, for which there has to be a tokenizer."""

    prompt: str
    query: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """Ids."""

    prompt_token_ids: list[int]
    query_token_ids: NotRequired[list[int]]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]


PromptInputs = str | list[int] | TextPrompt | TokensPrompt


def prompt_inputs(inputs: PromptInputs) -> TextPrompt | TokensPrompt:
    """A prompt as a dictionary. Raises TypeError."""
    if isinstance(inputs, str):
        return TextPrompt(prompt=inputs)
    if isinstance(inputs, list):
        return TokensPrompt(prompt_token_ids=inputs)
    if isinstance(inputs, dict):
        return inputs
    raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")


@dataclass(slots=True)
class LoRARequest:
    """An adapter; generate_async refuses it."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        # So the default is no valid value, and None is.
        if self.lora_path is not None and not Path(self.lora_path).exists():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")

    @property
    def adapter_id(self) -> int:
        """See lora_int_id."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """See lora_name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """See lora_path."""
        return self.lora_path

    @property
    def ckpt_source(self) -> str:
        """See lora_ckpt_source."""
        return self.lora_ckpt_source


@dataclass(slots=True)
class PromptAdapterRequest:
    """A prompt adapter; generate_async refuses it."""

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str = ""


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """What a prefill engine hands to a decode engine."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """Where a request is to run."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None


# Assigned here, for dataclasses look into the module that a class names while it is made.
LoRARequest.__module__ = "tensorrt_llm.executor.request"
PromptAdapterRequest.__module__ = "tensorrt_llm.executor.request"
DisaggregatedParams.__module__ = "tensorrt_llm.disaggregated_params"
SchedulingParams.__module__ = "tensorrt_llm.scheduling_params"
