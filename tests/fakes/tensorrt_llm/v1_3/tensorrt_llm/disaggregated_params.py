"""Disaggregated serving."""

from __future__ import annotations

from trtllm_standin.requests import DisaggregatedParams

__all__ = ["DisaggregatedParams"]
