"""How many prompt tokens may join a step: the budget, or what keeps to the latency target at the price learned."""

from __future__ import annotations

from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.step_cost import StepCost, StepShape

LEAST_PREFILL_SHARE = 0.5
"""Prompts may stretch a step by this share of what its decoding takes, whatever the latency target says."""

FIRST_PLAIN_STEPS = 32
PLAIN_STEPS_A_LOOK = 4
"""After the first ones, one in so many steps without prompts is learned from."""


class PrefillBudget:
    """The prompt tokens that one replica's next step may compute."""

    def __init__(self, policy: Policy, block_size: int) -> None:
        self._most = policy.max_batch_prefill_tokens
        self._least = min(self._most, block_size)
        self._target_s = policy.target_itl_s
        self._cost = StepCost()
        self._plain_steps = 0
        """Steps without prompts."""

    @property
    def learns(self) -> bool:
        """Whether the cost of steps matters."""
        return self._target_s is not None

    def learn(self, shape: StepShape, seconds: float) -> None:
        """A step took so long."""
        if not shape.prefill_tokens:
            # There are many of these, and each says much the same.
            self._plain_steps += 1
            if self._plain_steps > FIRST_PLAIN_STEPS and self._plain_steps % PLAIN_STEPS_A_LOOK:
                return
        self._cost.observe(shape, seconds)

    def tokens(self, decode_rows: int, decode_context: int, start: int) -> int:
        """The budget beside so many decoding rows that read so much context; the first prompt token of it stands at
        position `start` of its prompt."""
        if self._target_s is None or decode_rows <= 0:
            return self._most
        if not self._cost.ready:
            return self._least
        alone = self._cost.predict(StepShape(0, decode_rows, decode_context, 0))
        target = max(self._target_s, alone * (1 + LEAST_PREFILL_SHARE))
        return max(self._least, min(self._most, self._cost.budget(decode_rows, decode_context, start, target)))
