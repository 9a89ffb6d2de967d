"""The duration of a step of one replica, as a linear function of its contents.

    seconds = base + per_prefill_token · P + per_row · R + per_context_token · C + per_pair · A

    P   prompt tokens computed in the step, over all chunks
    R   sequences in the step: those that decode, and the chunks
    C   tokens in the KV cache that decoding sequences read
    A   pairs (token computed, token it attends to) of the chunks

A decoding sequence reads one token more in each step, so consecutive steps with the same sequences grow by a constant.
Their sum has a closed form, which lets the simulator skip over many steps at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class CostModel:
    """Step costs and capacity of one replica."""

    base_s: float
    per_prefill_token_s: float
    per_row_s: float
    per_context_token_s: float
    per_pair_s: float
    slots: int
    """Most sequences running at once."""
    kv_tokens: int
    """Size of the KV cache, in tokens."""
    block_size: int
    """Tokens per KV block."""
    prefill_budget: int
    """Most prompt tokens of a step, without a latency target."""
    target_itl_s: float
    """Inter-token latency target, also the limit for goodput."""
    growth_tokens: int
    """Free tokens that an allocation of KV blocks restores."""
    states: int = 0
    """Blocks of the group of states; 0: the model has none."""
    host_tokens: int = 0
    """Size of the host cache, in tokens; 0: there is none."""
    copied_token_s: float = 0.0
    """Time to copy the KV of a token between device and host."""
    orders_delay_s: float = 0.0003
    """Time from the decision until the replica has the orders."""

    def step_s(self, prefill_tokens: int, rows: int, context_tokens: int, pairs: int) -> float:
        """Return the duration of a step."""
        return (
            self.base_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_row_s * rows
            + self.per_context_token_s * context_tokens
            + self.per_pair_s * pairs
        )

    def growth_s(self, rows: int) -> float:
        """Return by how much each step is longer than the one before, with `rows` decoding sequences."""
        return self.per_context_token_s * rows

    def capacity(self, prompt_tokens: float, new_tokens: float) -> float:
        """Return the requests per second of this mean size that one replica can serve at best, without prefix cache.

        A request costs its prompt and its share of the steps, in a batch as large as slots and KV cache allow.
        """
        context = prompt_tokens + new_tokens / 2
        batch = max(1.0, min(self.slots, self.kv_tokens / (prompt_tokens + new_tokens)))
        prefill = self.per_prefill_token_s * prompt_tokens + self.per_pair_s * prompt_tokens**2 / 2
        decode = self.base_s / batch + self.per_row_s + self.per_context_token_s * context
        return 1 / (prefill + new_tokens * decode)


MACHINES: Mapping[str, CostModel] = MappingProxyType(
    {
        # SmolLM2-135M on two CPU cores, measured with the torch engine.
        "cpu-135m": CostModel(
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
            copied_token_s=10e-6,
        ),
        # An 8B model in bf16 on an H200. A context token is 128 KiB to read at about 4.3 TB/s; a pair is 2 · 2 · 4096 · 32
        # operations at about 500 TFLOP/s; 16 GB of weights leave room for 850 000 tokens of KV cache.
        "h200-8b": CostModel(
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
            copied_token_s=3.3e-6,  # at 40 GB/s
        ),
    }
)
