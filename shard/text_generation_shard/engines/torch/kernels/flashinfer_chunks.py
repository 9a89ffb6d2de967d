"""Attention of prompt chunks over the paged cache.

Heads of the usual sizes are served by FlashInfer's batched prefill, planned on the host once per step, all others, and these until
FlashInfer's kernels are compiled, by our own kernel: see kernels/chunk_attention.py and kernels/flashinfer_compiler.py. A plan of FlashInfer is written to pinned memory and copied asynchronously. Sets of buffers
take turns: when a step is planned, the copies of the previous step and of a prediction before that may still be pending, none before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.batch.step_plan import StepPlan

if TYPE_CHECKING:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

WORKSPACE = 256 << 20
"""Bytes for partial results of long prompts that are split."""
FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""Measured sizes. FlashInfer has a kernel for 512 as well, and compiles it for GPUs after Hopper only."""
BUFFER_SETS = 3


class ChunkShape(NamedTuple):
    """The properties of layers on which FlashInfer's kernels depend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_windows: tuple[bool, ...]
    has_softcap: bool
    dtype: str
    cache_dtype: str


class FlashInferChunks:
    """The interface of `PagedChunkAttention`; `groups` are those of the cache, by the sliding windows of the layers.

    `dtypes` are those of queries and of the cache.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        groups: Mapping[int | None, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        *,
        scale: float,
        softcap: float | None = None,
    ) -> None:
        try:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper
        except ImportError as error:
            raise EngineError(
                f"the torch engine on CUDA needs FlashInfer: pip install 'flashinfer-python>=0.6.14' 'ninja>=1.11' ({error})"
            ) from None
        self._heads = (num_heads, num_kv_heads, head_dim)
        self._dtype, self._cache_dtype = dtypes
        self._scale, self._softcap = scale, softcap
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self._buffer_sets: list[dict[int | None, BatchPrefillWithPagedKVCacheWrapper]] = [
            {window: BatchPrefillWithPagedKVCacheWrapper(workspace, "HND") for window in groups}
            for _ in range(BUFFER_SETS)
        ]
        self._groups = groups

    @property
    def shape(self) -> ChunkShape:
        windows = tuple(sorted({window is not None for window in self._groups}))
        names = (str(each).removeprefix("torch.") for each in (self._dtype, self._cache_dtype))
        return ChunkShape(*self._heads, windows, self._softcap is not None, *names)

    @classmethod
    def compile(cls, shape: ChunkShape) -> None:
        """Compile the kernels of a shape, and load them into this process."""
        dtypes = getattr(torch, shape.dtype), getattr(torch, shape.cache_dtype)
        groups = {1 if has_window else None: 0 for has_window in shape.has_windows}
        chunks = cls(*shape[:3], groups, dtypes, scale=1.0, softcap=1.0 if shape.has_softcap else None)
        for window, wrapper in chunks._buffer_sets[0].items():
            ends = torch.tensor([0, 1], dtype=torch.int32)
            chunks._plan(wrapper, window, ends, ends, ends[:1].cuda(), ends[1:], 1)

    def plan(self, plan: StepPlan, columns: Mapping[str, Tensor]) -> None:
        self._buffer_sets.append(self._buffer_sets.pop(0))
        query_indptr, page_ends, last_pages = (
            torch.from_numpy(plan.column(name)) for name in ("query_indptr", "page_indptr", "last_pages")
        )
        for window, wrapper in self._buffer_sets[0].items():
            start, end = plan.page_indptr(self._groups[window])
            page_indptr = page_ends[start:end]
            first, last = page_indptr[[0, -1]].tolist()
            pages = columns["pages"][first:last]
            self._plan(wrapper, window, query_indptr, page_indptr - first, pages, last_pages, plan.longest_chunk)

    def _plan(
        self,
        wrapper: BatchPrefillWithPagedKVCacheWrapper,
        window: int | None,
        query_indptr: Tensor,
        page_indptr: Tensor,
        pages: Tensor,
        last_pages: Tensor,
        longest: int,
    ) -> None:
        wrapper.plan(
            query_indptr,
            page_indptr,
            pages,
            last_pages,
            *self._heads,
            BLOCK_SIZE,
            causal=True,
            window_left=-1 if window is None else window - 1,
            sm_scale=self._scale,
            logits_soft_cap=self._softcap,
            q_data_type=self._dtype,
            kv_data_type=self._cache_dtype,
            non_blocking=True,
            max_token_per_sequence=longest,
        )

    def run(
        self,
        queries: Tensor,
        cache_layer: Tensor,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        wrapper, heads_out = self._buffer_sets[0][window], out.view(queries.shape)
        if scales is not None:
            # FlashInfer has one scale for all heads.
            key_scales, value_scales = scales.repeat_interleave(queries.shape[1] // cache_layer.shape[2], 1).unsqueeze(
                2
            )
            queries = (queries * key_scales).to(queries.dtype)
        if sinks is None:
            wrapper.run(queries, cache_layer, out=heads_out)
        else:
            # A sink s scales the result by 1 / (1 + exp(s) / Σ exp(scores)).
            _, log2_sums = wrapper.run(queries, cache_layer, out=heads_out, return_lse=True)
            heads_out.mul_(torch.sigmoid(log2_sums * math.log(2) - sinks.float()).unsqueeze(-1))
        if scales is not None:
            heads_out.mul_(value_scales)
