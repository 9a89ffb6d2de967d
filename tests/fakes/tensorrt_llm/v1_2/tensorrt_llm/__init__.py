"""The stand-in for NVIDIA's tensorrt_llm, release 1.2: see the package trtllm_standin in the folder common."""

import sys
from pathlib import Path

COMMON = str(Path(__file__).resolve().parents[2] / "common")
if COMMON not in sys.path:
    sys.path.append(COMMON)

from trtllm_standin.package import install  # noqa: E402 - found on the path added above

install("1.2")
