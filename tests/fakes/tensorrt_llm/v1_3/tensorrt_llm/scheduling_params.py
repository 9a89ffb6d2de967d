"""Where a request is to run."""

from __future__ import annotations

from trtllm_standin.requests import SchedulingParams

__all__ = ["SchedulingParams"]
