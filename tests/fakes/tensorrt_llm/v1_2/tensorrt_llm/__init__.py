"""Stands in for NVIDIA's tensorrt_llm 1.2.1: see the package trtllm_standin in the folder common."""

from __future__ import annotations

import sys
from pathlib import Path

COMMON = str(Path(__file__).resolve().parents[2] / "common")
if COMMON not in sys.path:
    sys.path.append(COMMON)

from tensorrt_llm.llmapi import LLM, SamplingParams  # noqa: E402 - the path has to be there first
from tensorrt_llm.version import __version__  # noqa: E402 - see above

__all__ = ["LLM", "SamplingParams", "__version__"]
