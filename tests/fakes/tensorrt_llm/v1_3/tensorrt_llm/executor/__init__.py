"""The executor: between the LLM and its engine."""

from __future__ import annotations

from trtllm_standin.errors import EngineDeadError
from trtllm_standin.executor import NewerExecutor as GenerationExecutor

from tensorrt_llm.executor.request import LoRARequest, PromptAdapterRequest
from tensorrt_llm.executor.result import DetokenizedGenerationResultBase, GenerationResult, IterationResult
from tensorrt_llm.executor.utils import RequestError

__all__ = [
    "DetokenizedGenerationResultBase",
    "EngineDeadError",
    "GenerationExecutor",
    "GenerationResult",
    "IterationResult",
    "LoRARequest",
    "PromptAdapterRequest",
    "RequestError",
]
