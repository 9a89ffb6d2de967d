"""The self-scheduling echo engine as one with a prefix cache of its own."""

from __future__ import annotations

from self_scheduling_echo import SelfSchedulingEcho

from text_generation_shard.engine import StepResult


class CachingEcho(SelfSchedulingEcho):
    """Reports, from the second token of a sequence on, that it found `found` prompt tokens."""

    found = 0

    def step(self) -> StepResult | None:
        result = super().step()
        if result is not None:
            result.cached += [(slot, self.found) for slot in result.slots if slot in self._begun]
            self._begun.update(result.slots)
            self._begun.difference_update(slot for slot, _ in result.finished)
        return result

    def reset(self) -> None:
        super().reset()
        self._begun: set[int] = set()
