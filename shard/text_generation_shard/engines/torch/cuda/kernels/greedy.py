"""Greedy choice: the most probable token of each row, and the logarithm of its probability.

A program takes a stretch of one row's logits, all of it in registers, and leaves its maximum, where that first is, and the
sum of exp(logit − maximum). The program that is done last with a row puts them together. The chosen logit is the row's
maximum, so its log-probability is −log Σ exp(logit − maximum).
"""

# ruff: noqa: N803 – constants of kernels are in capitals, as Triton has them
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.cuda.kernels.arrival import arrives_last

SHORTEST, LONGEST = 1024, 4096
"""Logits in a stretch: short ones occupy the device when there are few rows, long ones leave little to put together."""
MANY_PROGRAMS = 1024


class GreedyChoice:
    """Greedy choice from up to `max_rows` rows of `vocab_size` logits, with the workspace for it."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        stretches = triton.cdiv(vocab_size, SHORTEST)
        self._maxima = torch.empty(max_rows, stretches, dtype=torch.float32, device=device)
        self._sums = torch.empty_like(self._maxima)
        self._indices = torch.empty(max_rows, stretches, dtype=torch.int32, device=device)
        self._arrivals = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def run(self, logits: Tensor, slots: Tensor, last_tokens: Tensor, token_ids: Tensor, logprobs: Tensor) -> None:
        """Choose the first index of the maximum of each row of `logits` [rows, vocab_size], of any float dtype.

        Writes `token_ids` int32 [rows], `logprobs` float32 [rows] and last_tokens[slots[row]] (int32). A row that holds
        NaN or +inf, or nothing but −inf, gets a log-probability that is not finite, and a token of the vocabulary.
        """
        rows = logits.shape[0]
        stretch = SHORTEST
        while stretch < LONGEST and rows * triton.cdiv(self._vocab_size, stretch) > MANY_PROGRAMS:
            stretch *= 2
        stretches = triton.cdiv(self._vocab_size, stretch)
        _choose_kernel[(stretches, rows)](
            logits,
            slots,
            last_tokens,
            token_ids,
            logprobs,
            self._maxima,
            self._sums,
            self._indices,
            self._arrivals,
            logits.stride(0),
            self._maxima.stride(0),
            VOCAB_SIZE=self._vocab_size,
            STRETCH=stretch,
            STRETCHES=triton.next_power_of_2(stretches),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["workspace_stride"])
def _choose_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    logits: tl.tensor,
    slots: tl.tensor,
    last_tokens: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    indices: tl.tensor,
    arrivals: tl.tensor,
    logits_stride: int,
    workspace_stride: int,
    VOCAB_SIZE: tl.constexpr,
    STRETCH: tl.constexpr,
    STRETCHES: tl.constexpr,
) -> None:
    part, row = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(0)
    slot = tl.load(slots + row)
    own = tl.arange(0, STRETCH)
    here = part * STRETCH + own
    logit = tl.load(logits + row.to(tl.int64) * logits_stride + here, mask=here < VOCAB_SIZE, other=float("-inf")).to(
        tl.float32
    )
    # The maximum passes over NaN, the sum does not. A stretch of −inf only (tokens that may not be chosen) has sum 0.
    maximum = tl.max(logit)
    total = tl.sum(tl.exp(logit - tl.where(maximum == float("-inf"), 0.0, maximum)))
    index = part * STRETCH + tl.min(tl.where(logit == maximum, own, STRETCH - 1))
    line = row * workspace_stride
    tl.store(maxima + line + part, maximum)
    tl.store(sums + line + part, total)
    tl.store(indices + line + part, index)

    if arrives_last(arrivals + row, parts):
        all_parts = tl.arange(0, STRETCHES)
        is_part = all_parts < parts
        # Other programs have written these a moment ago: past this processor's own cache.
        part_maxima = tl.load(maxima + line + all_parts, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        part_sums = tl.load(sums + line + all_parts, mask=is_part, other=0.0, cache_modifier=".cg")
        part_indices = tl.load(indices + line + all_parts, mask=is_part, other=VOCAB_SIZE, cache_modifier=".cg")
        best = tl.max(part_maxima)
        # A row of −inf only divides nothing by nothing: NaN.
        total = tl.sum(part_sums * tl.exp(part_maxima - best))
        token = tl.min(tl.where(part_maxima == best, part_indices, VOCAB_SIZE - 1))
        token = tl.minimum(token, VOCAB_SIZE - 1)
        tl.store(token_ids + row, token)
        tl.store(logprobs + row, -tl.log(total))
        tl.store(last_tokens + slot, token)
