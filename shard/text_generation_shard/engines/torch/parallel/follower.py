"""The engine of a rank above 0: executes the commands of rank 0 and serves no router.

One thread receives commands from the control channel and executes them. When the group breaks or a step fails, the
engine reports it, and the shard exits.
"""

import threading
from collections.abc import Callable
from typing import NoReturn

from text_generation_common.log import log
from text_generation_common.one_line import typed_line
from text_generation_shard.engine import EngineError, EngineInfo, StepResult, SynchronousEngine
from text_generation_shard.engines.torch.parallel.channel import GOODBYE, FollowerChannel, GroupBroken

CLOSE_TIMEOUT = 5.0
"""Seconds to wait at `close` for the step in progress."""
STUCK_AFTER = 0.5
"""Seconds after which the follower thread is assumed to be blocked in a collective when rank 0 is lost."""


Execute = Callable[[int, memoryview], int | None]
"""Executes a command of rank 0, a kind and a payload; returns the reply, if it expects one. The payload is valid until then."""


class FollowerEngine(SynchronousEngine):
    """The engine described in the module docstring. Starts to follow when it is created."""

    grammars = None
    running = used_blocks = prefilling = 0  # rank 0 holds the sequences

    def __init__(self, info: EngineInfo, rank: int, channel: FollowerChannel, execute: Execute) -> None:
        self.info = info
        self._rank = rank
        self._channel = channel
        self._execute = execute
        self._callback: Callable[[str], None] | None = None
        self._broken: str | None = None
        self._closing = False
        self._lock = threading.Lock()
        # Daemon: a thread blocked in a collective of a broken group must not keep the process alive.
        self._thread = threading.Thread(target=self._follow, name="engine follower", daemon=True)
        self._thread.start()
        channel.watch(self._on_leader_lost)

    def _refuse(self, *_: object) -> NoReturn:
        raise EngineError(f"rank {self._rank} follows: call rank 0")

    warm_up = apply = set_adapter = _refuse

    def step(self) -> StepResult | None:
        return None

    def reset(self) -> None:
        """Nothing to drop: rank 0 holds the sequences."""

    def on_broken(self, callback: Callable[[str], None]) -> None:
        with self._lock:
            self._callback = callback
            broken = self._broken
        if broken is not None:
            callback(broken)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT)

    def _follow(self) -> None:
        try:
            while True:
                kind, payload = self._channel.receive()
                if kind == GOODBYE:
                    self._leave("rank 0 has left")
                    return
                if (answer := self._execute(kind, payload)) is not None:
                    self._channel.answer(answer)
        except GroupBroken as error:
            self._break(str(error))
        except Exception as error:
            log.exception("the follower failed", rank=self._rank)
            self._leave(typed_line(error))

    def _on_leader_lost(self, reason: str) -> None:
        """Report the loss, on the channel's thread, after giving the follower thread time to report a better reason."""
        self._thread.join(STUCK_AFTER)
        self._break(reason)

    def _break(self, reason: str) -> None:
        if self._leave(reason):
            log.error("the group is broken", rank=self._rank, reason=reason)

    def _leave(self, reason: str) -> bool:
        """Record that the group has ended. Returns True the first time."""
        with self._lock:
            if self._closing or self._broken is not None:
                return False
            self._broken = reason
            callback = self._callback
        if callback is not None:
            callback(reason)
        return True
