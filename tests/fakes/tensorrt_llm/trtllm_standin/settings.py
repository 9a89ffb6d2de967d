"""The environment variables that set the stand-in's pace and cause failures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from functools import cached_property

from pydantic import Field
from pydantic_settings import BaseSettings

PREFIX = "TRTLLM_STANDIN_"
SINGLE_PROCESS = "TLLM_WORKER_USE_SINGLE_PROCESS"
"""The library's own variable: no worker process; errors of a request are raised when it is submitted."""


class Fault(Enum):
    """A failure that happens when the token id named by the variable is generated."""

    REQUEST = "FAIL_TOKEN"
    """The request fails."""
    UNSCORED = "UNSCORED_TOKEN"
    """The token comes without its log-probability, against which the reader of the request asserts (result.py)."""
    STEP = "STEP_FAIL_TOKEN"
    """The step fails, and every active request with it."""
    HANG = "HANG_STEP_TOKEN"
    """The engine never produces anything again."""
    FATAL = "FATAL_TOKEN"
    """The engine dies: a background error, which the next call raises."""


class Settings(BaseSettings, env_prefix=PREFIX):
    """A field per variable TRTLLM_STANDIN_NAME; `faults` has an entry per Fault."""

    step_ms: float = 1
    """Duration of a step."""
    prefill_us: float = 0
    """Additional duration per prompt token computed."""
    stats_ms: float = 200
    """1.2: interval at which statistics are handed over."""
    tokens_per_step: int = 1
    """Tokens that arrive at once, as with speculative decoding."""
    drafts_in_responses: bool = False
    """Each output has the sums of its drafts, as in late 1.3 (LlmResult.spec_dec_totals, per_pos_drafted)."""
    hang_shutdown: bool = False
    """shutdown() never returns."""
    step_fail_ends: bool = False
    """The engine's loop ends after a failed step."""
    cancel_with_token: bool = False
    """The last item of a cancelled request has a token without log-probabilities."""
    workers: bool = False
    """Start a process per rank."""
    log: str = ""
    """File for the records of `inspection`."""
    single_process: bool = Field(False, validation_alias=SINGLE_PROCESS)

    @cached_property
    def faults(self) -> Mapping[int, Fault]:
        """Token id → what happens when it is generated."""
        environ = os.environ
        return {int(token): fault for fault in Fault if (token := environ.get(f"{PREFIX}{fault.value}"))}
