"""The legacy backend's LLM. Nearest: tensorrt_llm/_tensorrt_engine/__init__.py at 1620d4fd."""

from __future__ import annotations

from tensorrt_llm.llmapi.llm import _TrtLLM as LLM

__all__ = ["LLM"]
