"""Drives a self-scheduling engine: whole prompts in, tokens out, without blocks, chunks or allocations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine_driver import Driver, Stream

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.engine import Engine, Scheduling, StepResult


class SelfDriver(Driver):
    """A Driver that only allocates slots; the engine schedules itself."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, (CacheGroup(0),))
        self.cached: list[tuple[int, int]] = []
        """(slot, cached prompt tokens) of all results."""

    def admit(self, prompt: Sequence[int], new: int = 8, **admission: object) -> Stream:  # type: ignore[override]
        stream = super().admit(prompt, new, **admission | {"allocated": 0})  # type: ignore[arg-type]
        stream.to_prefill = 0
        return stream

    def _record(self, result: StepResult) -> None:
        self.cached += result.cached
        counts = result.token_counts or [1] * len(result.slots)
        slots = [slot for slot, count in zip(result.slots, counts, strict=True) for _ in range(count)]
        super()._record(replace(result, slots=slots, token_counts=[]))


def driver_for(engine: Engine, limits: WarmUpLimits) -> Driver:
    """Warm the engine up and return a driver for its kind of scheduling."""
    groups = engine.warm_up(limits)
    return SelfDriver(engine) if engine.info.scheduling is Scheduling.SELF else Driver(engine, groups)
