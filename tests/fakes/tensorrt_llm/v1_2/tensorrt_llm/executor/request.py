"""What a request names beside its prompt."""

from __future__ import annotations

from trtllm_standin.requests import LoRARequest, PromptAdapterRequest

__all__ = ["LoRARequest", "PromptAdapterRequest"]
