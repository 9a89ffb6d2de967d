"""Attention of prompt chunks over the paged cache: FlashInfer's batched prefill, planned on the host once a step.

A plan is written to pinned memory and copied from there while the host goes on. Two sets of buffers take turns: when a step
is planned the one before it may still have its copy ahead of it, but no earlier one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.cuda.step_plan import StepPlan
from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

WORKSPACE = 256 << 20
"""Bytes for partial results of long prompts that are split."""
HEAD_DIMS = (64, 128, 256)
TURNS = 2


class ChunkAttention:
    """One rank's heads; `windows` are the sliding windows of its layers, None for none."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, windows: frozenset[int | None], dtype: torch.dtype
    ) -> None:
        try:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper
        except ImportError as error:
            raise EngineError(
                f"the torch engine on CUDA needs FlashInfer: pip install 'text-generation-trtllm[cuda]' ({error})"
            ) from None
        if head_dim not in HEAD_DIMS:
            raise EngineError(f"head_dim {head_dim} is not served on CUDA, only {', '.join(map(str, HEAD_DIMS))}")
        self._heads = (num_heads, num_kv_heads, head_dim)
        self._dtype = dtype
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self._turns: list[dict[int | None, BatchPrefillWithPagedKVCacheWrapper]] = [
            {window: BatchPrefillWithPagedKVCacheWrapper(workspace, "HND") for window in windows} for _ in range(TURNS)
        ]

    def plan(self, plan: StepPlan, pages: Tensor) -> None:
        """Get ready for the chunks of `plan`, whose column of pages is `pages` on the device."""
        self._turns.append(self._turns.pop(0))
        query_indptr, page_indptr, last_pages = (
            torch.from_numpy(plan.column(name)) for name in ("query_indptr", "page_indptr", "last_pages")
        )
        longest = int((query_indptr[1:] - query_indptr[:-1]).max())
        num_heads, num_kv_heads, head_dim = self._heads
        for window, wrapper in self._turns[0].items():
            wrapper.plan(
                query_indptr,
                page_indptr,
                pages,
                last_pages,
                num_heads,
                num_kv_heads,
                head_dim,
                BLOCK_SIZE,
                causal=True,
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                non_blocking=True,
                max_token_per_sequence=longest,
            )

    def run(self, queries: Tensor, cache_layer: Tensor, window: int | None, out: Tensor) -> None:
        """`queries` [tokens, heads, head_dim] of the chunks planned last; `out` [tokens, heads · head_dim]."""
        self._turns[0][window].run(queries, cache_layer, out=out.view(queries.shape))
