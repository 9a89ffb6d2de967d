"""Results of requests."""

from __future__ import annotations

from trtllm_standin.completion import CompletionOutput
from trtllm_standin.iteration import IterationResult
from trtllm_standin.responses import Logprob, TokenLogprobs
from trtllm_standin.results import DetokenizedGenerationResultBase, GenerationResultBase
from trtllm_standin.results import TimedGenerationResult as GenerationResult

__all__ = [
    "CompletionOutput",
    "DetokenizedGenerationResultBase",
    "GenerationResult",
    "GenerationResultBase",
    "IterationResult",
    "Logprob",
    "TokenLogprobs",
]
