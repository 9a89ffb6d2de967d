"""Watchdog: notices that the engine will never bring anything again, because nobody else would.

A worker process that dies leaves every request of 1.2 waiting for ever, and so does a loop that stopped after a failed step.
Three signs: a worker process is gone; the engine says that it is not healthy; requests run and nothing comes. A long prompt is no
hang: while one is being computed, iterations are progress, and each of its tokens adds to the time allowed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass

from text_generation_shard.processes import Process

LOOK_EVERY_S = 0.5
SECONDS_A_PROMPT_TOKEN = 0.001
"""Time a prompt token may take, in one step with all others that wait: a tenth of the speed of anything that is useful."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the requests stand; times of the monotonic clock."""

    running: int
    waiting_prompt_tokens: int
    """Of requests that have brought no token yet."""
    last_sign: float
    """When something last came, or began."""


class Watchdog:
    """Calls `on_broken` with a reason, once. Looks from a thread of its own."""

    def __init__(
        self,
        is_healthy: Callable[[], bool],
        progress: Callable[[], Progress],
        hang_timeout_s: float,
        on_broken: Callable[[str], None],
    ) -> None:
        self._processes: Sequence[Process] = ()
        self._is_healthy = is_healthy
        self._progress = progress
        self._hang_timeout_s = hang_timeout_s
        self._on_broken = on_broken
        self._closing = threading.Event()
        # What the log says of every record lives in the context.
        context = copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="tensorrt-llm watchdog", daemon=True
        )

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def watch(self, processes: Sequence[Process]) -> None:
        """None of these is to end."""
        self._processes = processes

    def close(self) -> None:
        """Look no more: what happens from now on is meant to happen."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            if (reason := self._look()) is not None:
                if not self._closing.is_set():
                    self._on_broken(reason)
                return

    def _look(self) -> str | None:
        for process in self._processes:
            if not process.is_alive:
                return f"worker process {process.pid} of the engine died"
        try:
            if not self._is_healthy():
                return "the engine says that it is not healthy"
        except Exception as error:  # noqa: BLE001 - whoever cannot even say so is not; and nobody else would look
            return f"the engine does not say whether it is healthy: {type(error).__name__}: {error}"
        progress = self._progress()
        if progress.running == 0:
            return None
        allowed = self._hang_timeout_s + SECONDS_A_PROMPT_TOKEN * progress.waiting_prompt_tokens
        silent = time.monotonic() - progress.last_sign
        if silent > allowed:
            return f"the engine has brought nothing for {silent:.0f} s, with {progress.running} requests running"
        return None
