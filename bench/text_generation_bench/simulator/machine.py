"""Machine: what a step costs, as a straight line over what is in it.

    seconds = base + per_prefill_token · P + per_row · R + per_context_token · C + per_pair · A

    P   prompt tokens computed in the step, over all chunks
    R   sequences in the step: those that decode, and the chunks
    C   tokens in the KV cache that the decoding ones read
    A   pairs (token computed, token it attends to) of the chunks

A decoding sequence reads one token more each step, so steps in which nothing else changes grow by a constant, and many of
them have a closed form: that is what lets the simulation leap over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica: what its steps cost, in seconds, and what it holds."""

    base_s: float
    per_prefill_token_s: float
    per_row_s: float
    per_context_token_s: float
    per_pair_s: float
    slots: int
    """Sequences it runs at once."""
    kv_tokens: int
    """Tokens its KV cache holds."""
    block_size: int
    """Tokens a KV block holds."""
    prefill_budget: int
    """Prompt tokens a step may compute where no latency target says otherwise."""
    target_itl_s: float
    """The gap between tokens that its operator wants to hold, and that goodput is measured by."""
    growth_tokens: int
    """Tokens of room that a grant of KV blocks restores."""
    orders_delay_s: float = 0.0003
    """From the decision until the orders are with the replica."""

    def step_s(self, prefill_tokens: int, rows: int, context_tokens: int, pairs: int) -> float:
        """Seconds of one step."""
        return (
            self.base_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_row_s * rows
            + self.per_context_token_s * context_tokens
            + self.per_pair_s * pairs
        )

    def growth_s(self, rows: int) -> float:
        """By how much each step is longer than the one before, with `rows` sequences decoding."""
        return self.per_context_token_s * rows

    def capacity(self, prompt_tokens: float, new_tokens: float) -> float:
        """Requests a second of such a mean size that one replica can serve at best, no prompt token cached.

        A request costs its prompt, and its share of the steps of a batch as large as slots and KV cache allow.
        """
        context = prompt_tokens + new_tokens / 2
        batch = max(1.0, min(self.slots, self.kv_tokens / (prompt_tokens + new_tokens)))
        prefill = self.per_prefill_token_s * prompt_tokens + self.per_pair_s * prompt_tokens**2 / 2
        decode = self.base_s / batch + self.per_row_s + self.per_context_token_s * context
        return 1 / (prefill + new_tokens * decode)


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        # SmolLM2-135M on two CPU cores, as the torch engine was measured.
        "cpu-135m": Machine(
            base_s=22e-3,
            per_prefill_token_s=0.9e-3,
            per_row_s=1.5e-3,
            per_context_token_s=0.5e-6,
            per_pair_s=0.05e-6,
            slots=32,
            kv_tokens=65_536,
            block_size=16,
            prefill_budget=512,
            target_itl_s=0.15,
            growth_tokens=40,
        ),
        # An 8B model in bf16 on an H200. A context token is 128 KiB to read at about 4.3 TB/s; a pair is 2 · 2 · 4096 · 32
        # operations at about 500 TFLOP/s; 850 000 tokens of KV are what 16 GB of weights leave.
        "h200-8b": Machine(
            base_s=3.6e-3,
            per_prefill_token_s=13e-6,
            per_row_s=11e-6,
            per_context_token_s=30e-9,
            per_pair_s=1e-9,
            slots=256,
            kv_tokens=850_000,
            block_size=64,
            prefill_budget=8192,
            target_itl_s=0.04,
            growth_tokens=256,
        ),
    }
)
