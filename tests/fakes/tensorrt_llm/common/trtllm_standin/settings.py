"""The environment variables that set the stand-in's pace, and break it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

PREFIX = "TRTLLM_STANDIN_"
SINGLE_PROCESS = "TLLM_WORKER_USE_SINGLE_PROCESS"
"""The library's own variable: no worker process; what is wrong with a request shows when it is submitted."""


class Fault(Enum):
    """What happens when a request is to emit the token id that the variable names."""

    REQUEST = "FAIL_TOKEN"
    """That request fails, alone."""
    STEP = "STEP_FAIL_TOKEN"
    """The step fails, and every active request with it."""
    HANG = "HANG_STEP_TOKEN"
    """The engine never produces anything again."""
    FATAL = "FATAL_TOKEN"
    """The engine dies: a background error, that the next call raises."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One field a variable, named TRTLLM_STANDIN_ and the field's name in capitals; `faults` has one for each Fault."""

    step_ms: float = 1.0
    """Milliseconds that a step takes."""
    prefill_us: float = 0.0
    """Microseconds more for each prompt token that it computes."""
    tokens_per_step: int = 1
    """As with speculative decoding: so many tokens arrive at once."""
    stream_interval: int = 0
    """Items come at every so many iterations, whatever the argument of that name says; 0: as it says."""
    hang_shutdown: bool = False
    """shutdown() never returns."""
    step_fail_ends: bool = False
    """After a failed step the engine's loop is over: nothing is ever answered again."""
    cancel_with_token: bool = False
    """The last item of a cancelled request brings a token without its logprobs."""
    workers: bool = False
    """A child process for each rank."""
    gpus: int = 8
    """GPUs that the machine has."""
    stats: str = ""
    """How statistics are fetched: queue or rpc. Empty: as the release does."""
    log: str = ""
    """A file that gets a line of JSON for each thing that happens: `inspection`."""
    single_process: bool = False
    faults: Mapping[int, Fault] = field(default_factory=dict)
    """Token id → what happens when it is to be emitted."""

    @classmethod
    def read(cls) -> Settings:
        """As the environment says now. Raises ValueError for a value that is no number."""
        return cls(
            step_ms=float(_variable("STEP_MS", "1")),
            prefill_us=float(_variable("PREFILL_US", "0")),
            tokens_per_step=int(_variable("TOKENS_PER_STEP", "1")),
            stream_interval=int(_variable("STREAM_INTERVAL", "0")),
            hang_shutdown=_flag("HANG_SHUTDOWN"),
            step_fail_ends=_flag("STEP_FAIL_ENDS"),
            cancel_with_token=_flag("CANCEL_WITH_TOKEN"),
            workers=_flag("WORKERS"),
            gpus=int(_variable("GPUS", "8")),
            stats=_variable("STATS", ""),
            log=_variable("LOG", ""),
            single_process=os.environ.get(SINGLE_PROCESS) == "1",
            faults={int(token): fault for fault in Fault if (token := _variable(fault.value, ""))},
        )


def _variable(name: str, default: str) -> str:
    return os.environ.get(PREFIX + name, default)


def _flag(name: str) -> bool:
    return _variable(name, "0") == "1"
