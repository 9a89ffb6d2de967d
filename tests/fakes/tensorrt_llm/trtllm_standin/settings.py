"""The environment variables that set the stand-in's pace and cause failures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

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


@dataclass(frozen=True, slots=True)
class Settings:
    """A field per variable TRTLLM_STANDIN_NAME; `faults` has an entry per Fault."""

    step_ms: float
    """Duration of a step."""
    prefill_us: float
    """Additional duration per prompt token computed."""
    stats_ms: float
    """1.2: interval at which statistics are handed over."""
    tokens_per_step: int
    """Tokens that arrive at once, as with speculative decoding."""
    hang_shutdown: bool
    """shutdown() never returns."""
    step_fail_ends: bool
    """The engine's loop ends after a failed step."""
    cancel_with_token: bool
    """The last item of a cancelled request has a token without log-probabilities."""
    workers: bool
    """Start a process per rank."""
    log: str
    """File for the records of `inspection`."""
    single_process: bool
    faults: Mapping[int, Fault] = field(default_factory=dict)
    """Token id → what happens when it is generated."""

    @classmethod
    def read(cls) -> Settings:
        """Read the environment. Raises ValueError for a value that is not a number."""
        return cls(
            step_ms=float(_variable("STEP_MS", "1")),
            prefill_us=float(_variable("PREFILL_US", "0")),
            stats_ms=float(_variable("STATS_MS", "200")),
            tokens_per_step=int(_variable("TOKENS_PER_STEP", "1")),
            hang_shutdown=_flag("HANG_SHUTDOWN"),
            step_fail_ends=_flag("STEP_FAIL_ENDS"),
            cancel_with_token=_flag("CANCEL_WITH_TOKEN"),
            workers=_flag("WORKERS"),
            log=_variable("LOG", ""),
            single_process=os.environ.get(SINGLE_PROCESS) == "1",
            faults={int(token): fault for fault in Fault if (token := _variable(fault.value, ""))},
        )


def _variable(name: str, default: str) -> str:
    return os.environ.get(PREFIX + name, default)


def _flag(name: str) -> bool:
    return _variable(name, "0") == "1"
