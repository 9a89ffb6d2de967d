"""The engine of a rank above 0: it computes what rank 0 computes, when rank 0 says so, and answers nobody else.

One thread waits at the control channel and hands what comes to its mirror. Where the group breaks, or a step does, there is
nothing left to follow: the shard is told, and its process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Protocol

import structlog

from text_generation_shard.engine import EngineError, EngineInfo, Failure, InProcess, Orders, StepResult, WarmUpLimits
from text_generation_shard.engines.torch.cuda.parallel.channel import GOODBYE, Follower, GroupBroken

CLOSE_TIMEOUT = 5.0
"""Seconds to wait, on the way out, for the step in progress."""
STUCK_AFTER = 0.5
"""Seconds in which the thread that follows should have seen for itself that rank 0 is gone; else it hangs in a collective."""

log = structlog.get_logger()


class Mirror(Protocol):
    """What computes on this device."""

    def mirror(self, kind: int, payload: memoryview) -> int | None:
        """Do what rank 0 does; an int is the answer it waits for. `payload` is valid until this returns."""
        ...


class FollowerEngine(InProcess):
    """See the module. Follows from the moment it is made."""

    def __init__(self, info: EngineInfo, rank: int, channel: Follower, mirror: Mirror) -> None:
        self.info = info
        self._rank = rank
        self._channel = channel
        self._mirror = mirror
        self._tell: Callable[[str], None] | None = None
        self._broken: str | None = None
        self._closing = False
        self._lock = threading.Lock()
        # A thread that hangs in a collective of a broken group does not keep the process.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._follow,), name="engine follower", daemon=True
        )
        self._thread.start()
        channel.watch(self._hung_up)

    @property
    def grammars(self) -> None:
        """They are rank 0's business."""
        return None

    @property
    def running(self) -> int:
        return 0

    @property
    def used_blocks(self) -> int:
        return 0

    def warm_up(self, limits: WarmUpLimits) -> int:
        raise EngineError(f"rank {self._rank} follows: call rank 0")

    def apply(self, orders: Orders) -> list[Failure]:
        raise EngineError(f"rank {self._rank} follows: call rank 0")

    def step(self) -> StepResult | None:
        return None

    def reset(self) -> None:
        """Nothing to drop: what is held, rank 0 says."""

    def on_broken(self, tell: Callable[[str], None]) -> None:
        with self._lock:
            self._tell = tell
            broken = self._broken
        if broken is not None:
            tell(broken)

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
                if (answer := self._mirror.mirror(kind, payload)) is not None:
                    self._channel.answer(answer)
        except GroupBroken as error:
            self._break(str(error))
        except Exception as error:
            log.exception("the follower failed", rank=self._rank)
            self._leave(" ".join(f"{type(error).__name__}: {error}".split()))

    def _hung_up(self, reason: str) -> None:
        """On the channel's thread."""
        self._thread.join(STUCK_AFTER)
        self._break(reason)

    def _break(self, reason: str) -> None:
        if self._leave(reason):
            log.error("the group is broken", rank=self._rank, reason=reason)

    def _leave(self, reason: str) -> bool:
        """There is nothing to follow any more. Whether that is news."""
        with self._lock:
            if self._closing or self._broken is not None:
                return False
            self._broken = reason
            tell = self._tell
        if tell is not None:
            tell(reason)
        return True
