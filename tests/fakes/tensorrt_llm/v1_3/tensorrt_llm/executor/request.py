"""What a request names beside its prompt."""

from __future__ import annotations

from trtllm_standin.requests import LoRARequest, PromptAdapterRequest

DEFAULT_REQUEST_PRIORITY = 0.5
"""Of a request that gives none, in 0 … 1; higher comes first, where the waiting queue asks."""

__all__ = ["DEFAULT_REQUEST_PRIORITY", "LoRARequest", "PromptAdapterRequest"]
