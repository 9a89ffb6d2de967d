"""Greedy sampling: the most probable token of each row, and its log-probability.

A program loads a segment of one row's logits into registers and writes its maximum, the first index of the maximum, and the sum
of exp(logit − maximum). The last program of a row combines them. The sampled logit is the maximum of the row, so its
log-probability is −log Σ exp(logit − maximum).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.arrival import arrives_last

MIN_SEGMENT, MAX_SEGMENT = 1024, 4096
"""Logits per segment: short ones occupy the device when there are few rows, long ones leave little to combine."""
MANY_PROGRAMS = 1024


class GreedySampler:
    """Greedy sampling of up to `max_rows` rows of `vocab_size` logits, with its workspace."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        segments = triton.cdiv(vocab_size, MIN_SEGMENT)
        self._maxima = torch.empty(max_rows, segments, dtype=torch.float32, device=device)
        self._sums = torch.empty_like(self._maxima)
        self._indices = torch.empty(max_rows, segments, dtype=torch.int32, device=device)
        self._arrivals = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def run(self, logits: Tensor, slots: Tensor, last_tokens: Tensor, token_ids: Tensor, logprobs: Tensor) -> None:
        """Sample the first index of the maximum of each row of `logits` [rows, vocab_size], of any float dtype.

        Writes `token_ids` int32 [rows], `logprobs` float32 [rows] and last_tokens[slots[row]] (int32). A row with NaN or +inf,
        or with only −inf, gets a log-probability that is not finite and a valid token id.
        """
        rows = logits.shape[0]
        segment = MIN_SEGMENT
        while segment < MAX_SEGMENT and rows * triton.cdiv(self._vocab_size, segment) > MANY_PROGRAMS:
            segment *= 2
        segments = triton.cdiv(self._vocab_size, segment)
        _sample_kernel[(segments, rows)](
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
            SEGMENT=segment,
            SEGMENTS=triton.next_power_of_2(segments),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["workspace_stride"])
def _sample_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
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
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> None:
    part, row = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(0)
    slot = tl.load(slots + row)
    own = tl.arange(0, SEGMENT)
    here = part * SEGMENT + own
    logit = tl.load(logits + row.to(tl.int64) * logits_stride + here, mask=here < VOCAB_SIZE, other=float("-inf")).to(
        tl.float32
    )
    # The maximum ignores NaN, the sum does not. A segment of only −inf (tokens that are not allowed) has sum 0.
    maximum = tl.max(logit)
    total = tl.sum(tl.exp(logit - tl.where(maximum == float("-inf"), 0.0, maximum)))
    index = part * SEGMENT + tl.min(tl.where(logit == maximum, own, SEGMENT - 1))
    line = row * workspace_stride
    tl.store(maxima + line + part, maximum)
    tl.store(sums + line + part, total)
    tl.store(indices + line + part, index)

    if arrives_last(arrivals + row, parts):
        all_parts = tl.arange(0, SEGMENTS)
        is_part = all_parts < parts
        # Other programs have just written these: bypass this multiprocessor's L1 cache.
        part_maxima = tl.load(maxima + line + all_parts, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        part_sums = tl.load(sums + line + all_parts, mask=is_part, other=0.0, cache_modifier=".cg")
        part_indices = tl.load(indices + line + all_parts, mask=is_part, other=VOCAB_SIZE, cache_modifier=".cg")
        best = tl.max(part_maxima)
        # A row of only −inf gives NaN.
        total = tl.sum(part_sums * tl.exp(part_maxima - best))
        token = tl.min(tl.where(part_maxima == best, part_indices, VOCAB_SIZE - 1))
        token = tl.minimum(token, VOCAB_SIZE - 1)
        tl.store(token_ids + row, token)
        tl.store(logprobs + row, -tl.log(total))
        tl.store(last_tokens + slot, token)
