"""Results of requests."""

from __future__ import annotations

from trtllm_standin.completion import CompletionOutput
from trtllm_standin.iteration import IterationResult
from trtllm_standin.responses import Logprob, TokenLogprobs
from trtllm_standin.results import DetokenizedGenerationResultBase, GenerationResult, GenerationResultBase

__all__ = [
    "CompletionOutput",
    "DetokenizedGenerationResultBase",
    "GenerationResult",
    "GenerationResultBase",
    "IterationResult",
    "Logprob",
    "TokenLogprobs",
]
