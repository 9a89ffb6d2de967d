"""Attention of one query token per row over the paged cache: flash decoding, with the keys of a row split over programs.

A program handles one KV head of one row and a range of its keys. All query heads that share the KV head are the rows of one
matrix product (grouped-query attention, Ainslie et al. 2023), so keys and values are read once. If a row is split, each program
writes its softmax-weighted mean and the log of its sum of weights, and these partial results are merged (Flash-Decoding, Dao et
al. 2023; the running maximum and sum are from FlashAttention, Dao et al. 2022): by a second kernel if there are few programs,
else by the last program of a row.

Lengths and block tables are read on the device. The number of programs depends only on the number of rows, so that a CUDA graph
can be replayed with other lengths, and the result of a row does not depend on the lengths of the others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.kernels.arrival import arrives_last
from text_generation_shard.engines.torch.kernels.decode_launch import (
    FLOATS_PER_WARP,
    LaunchConfig,
    config_for,
    group_rows,
)
from text_generation_shard.engines.torch.kernels.operands import DecodeStep
from text_generation_shard.engines.torch.kernels.partial_results import LOG2_E, group_sink_weights, merge
from text_generation_shard.engines.torch.kernels.pdl import pdl, wait_for_previous

NO_WINDOW = 1 << 30
"""A window longer than any sequence."""

LATENT_HEADS = 64
"""Most query heads of a program that reads latent rows: eight warps hold their results."""


class DecodeAttention:
    """Decode attention for layers of one shape, with the workspaces for split rows.

    With `latent`, all heads attend to the same rows, whose first `latent` columns are the values. `config` replaces the result of
    `config_for` for every number of rows.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_rows: int,
        device: torch.device,
        *,
        latent: int = 0,
        config: LaunchConfig | None = None,
    ) -> None:
        if latent:
            # Programs share the heads as if each part of them had a KV head.
            num_kv_heads = num_heads // max(n for n in range(1, LATENT_HEADS + 1) if num_heads % n == 0)
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim, self._value_dim = head_dim, latent or head_dim
        self._group_rows = group_rows(num_heads, num_kv_heads)
        self._width = triton.next_power_of_2(self._value_dim)
        self._rest = max(16, triton.next_power_of_2(head_dim - latent)) if latent else 0
        gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        multiprocessors = gpu.multi_processor_count if gpu else 1
        self._configs = [
            config or config_for(rows, num_heads, num_kv_heads, head_dim, multiprocessors, 8 if latent else 4)
            for rows in range(1, max_rows + 1)
        ]
        parts = max(rows * config.splits for rows, config in enumerate(self._configs, start=1))
        self._partials = torch.empty(parts, num_heads, self._value_dim, dtype=torch.float32, device=device)
        self._logs = torch.empty(parts, num_heads, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(max_rows, num_kv_heads, dtype=torch.int32, device=device)

    def run(
        self,
        queries: Tensor,
        cache_layer: Tensor,
        step: DecodeStep,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        """out = softmax(scale · q·kᵀ)·v, [T, num_heads · value_dim], in the dtype of `queries`.

        `queries` [T, num_heads, head_dim], heads contiguous, rows with any stride; `cache_layer` [blocks, 2, num_kv_heads,
        BLOCK_SIZE, head_dim], contiguous, or of latent rows [blocks, 1, 1, BLOCK_SIZE, head_dim]. With a `window`, only keys with
        position − window < key <= position.
        `sinks` [num_heads] are scores of keys without values. `scales` float32 [2, num_kv_heads] multiply the keys and values of
        the cache.
        """
        rows = queries.shape[0]
        config = self._configs[rows - 1]
        # Pairs of FP8 numbers. Float32 queries would be rounded to float16.
        pairs = cache_layer.view(torch.int16) if cache_layer.itemsize == 1 and queries.itemsize == 2 else None
        _attend_kernel[(self._num_kv_heads, rows, config.splits)](
            queries,
            cache_layer,
            step.positions,
            step.slots,
            step.block_tables,
            pairs,
            out,
            self._partials,
            self._logs,
            self._arrivals,
            sinks,
            scales,
            step.scale * LOG2_E if step.softcap is None else step.scale / step.softcap,
            0.0 if step.softcap is None else step.softcap * LOG2_E,
            NO_WINDOW if window is None else window,
            config.min_blocks,
            queries.stride(0),
            step.block_tables.stride(0),
            out.stride(0),
            LAST_ARRIVAL_MERGES=config.merge == "last arrival",
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=step.softcap is not None,
            MERGED=FLOATS_PER_WARP * config.warps,
            KV_HEADS=self._num_kv_heads,
            GROUP=self._num_heads // self._num_kv_heads,
            GROUP_ROWS=self._group_rows,
            HEAD_DIM=self._head_dim,
            VALUE_DIM=self._value_dim,
            WIDTH=self._width,
            REST=self._rest,
            BLOCK=BLOCK_SIZE,
            num_warps=config.warps,
            num_stages=config.stages,
            **pdl(queries),
        )
        if config.splits > 1 and config.merge == "second kernel":
            _merge_kernel[(self._num_heads, rows)](
                step.positions,
                out,
                self._partials,
                self._logs,
                sinks,
                NO_WINDOW if window is None else window,
                config.splits,
                config.min_blocks,
                out.stride(0),
                BLOCK=BLOCK_SIZE,
                HEADS=self._num_heads,
                HEAD_DIM=self._value_dim,
                WIDTH=self._width,
                MERGED=FLOATS_PER_WARP * 4,
                num_warps=4,
                **pdl(queries),
            )


@triton.jit(do_not_specialize=["window", "min_blocks", "table_stride"])
def _attend_kernel(  # noqa: C901, PLR0913, PLR0915 – a kernel's arguments are flat, and its loop cannot be divided
    queries: tl.tensor,
    cache_layer: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    block_tables: tl.tensor,
    pairs: tl.tensor | None,
    out: tl.tensor,
    partials: tl.tensor,
    logs: tl.tensor,
    arrivals: tl.tensor,
    sinks: tl.tensor | None,
    scales: tl.tensor | None,
    scale: float,
    softcap: float,
    window: int,
    min_blocks: int,
    query_stride: int,
    table_stride: int,
    out_stride: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MERGED: tl.constexpr,
    LAST_ARRIVAL_MERGES: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    wait_for_previous(USE_PDL)
    # The split is the slowest dimension: programs without work come last and do not delay others.
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    first_block, end_block, blocks_per_part, parts = _row_parts(position, window, splits, min_blocks, BLOCK)
    # No slot is negative: the condition makes the compiler load the slot together with the position.
    if (split >= parts) | (slot < 0):
        return

    heads = kv_head * GROUP + tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, WIDTH)
    is_head = tl.arange(0, GROUP_ROWS)[:, None] < GROUP
    is_dim = (dims < VALUE_DIM)[None, :]
    query_rows = queries + row * query_stride + heads[:, None] * HEAD_DIM
    query = tl.load(query_rows + dims[None, :], mask=is_head & is_dim, other=0.0)
    if REST:
        rest = VALUE_DIM + tl.arange(0, REST)
        is_rest = (rest < HEAD_DIM)[None, :]
        query_rest = tl.load(query_rows + rest[None, :], mask=is_head & is_rest, other=0.0)
    if scales is not None:
        scale *= tl.load(scales + kv_head)
    offsets = tl.arange(0, BLOCK)
    keys_of_head = cache_layer if REST else cache_layer + kv_head * (BLOCK * HEAD_DIM)
    block_numbers: tl.constexpr = (1 if REST else 2 * KV_HEADS) * BLOCK * HEAD_DIM
    table = block_tables + slot.to(tl.int64) * table_stride
    begin = first_block + split * blocks_per_part
    end = min(begin + blocks_per_part, end_block)

    # Scores are in units of log 2, because the hardware computes exp2.
    maximum = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    if pairs is None:
        mean = tl.zeros([GROUP_ROWS, WIDTH], tl.float32)
    else:
        # In float16 FP8 numbers are exact and the conversion is one instruction for two numbers. Queries in bfloat16 may exceed it.
        largest = tl.maximum(tl.max(tl.abs(query.to(tl.float32))), 1e-30)
        query = (query / largest).to(tl.float16)
        scale *= largest
        mean = tl.zeros([GROUP_ROWS, WIDTH // 2], tl.float32)
        odd = tl.zeros([GROUP_ROWS, WIDTH // 2], tl.float32)
        pair_dims = tl.arange(0, WIDTH // 2)
    # Block numbers are loaded one iteration ahead.
    number = tl.load(table + begin)
    for block in range(begin, end):
        next_number = tl.load(table + tl.minimum(block + 1, end - 1))
        # A block has at least one visible key, so the maximum is finite. Masked keys are not loaded: they may be NaN.
        visible = offsets <= position - block * BLOCK
        if HAS_WINDOW:
            visible &= offsets > position - window - block * BLOCK
        rows = keys_of_head + number.to(tl.int64) * block_numbers + offsets[:, None] * HEAD_DIM
        key = tl.load(rows + dims[None, :], mask=visible[:, None] & is_dim, other=0.0)
        # FP8 keys and values are exact in the data type of the query.
        scores = tl.dot(query, tl.trans(key.to(query.dtype)))
        if REST:
            value = key
            key_rest = tl.load(rows + rest[None, :], mask=visible[:, None] & is_rest, other=0.0)
            scores = tl.dot(query_rest, tl.trans(key_rest.to(query.dtype)), scores)
        elif pairs is None:
            value = tl.load(
                rows + KV_HEADS * BLOCK * HEAD_DIM + dims[None, :], mask=visible[:, None] & is_dim, other=0.0
            )
        else:
            # Bytes cannot be transposed on their way to a matrix product, numbers of 16 bits can: pairs of columns.
            pair_rows = number.to(tl.int64) * (block_numbers // 2) + (KV_HEADS + kv_head) * (BLOCK * HEAD_DIM // 2)
            value = tl.load(
                pairs + pair_rows + offsets[:, None] * (HEAD_DIM // 2) + pair_dims[None, :],
                mask=visible[:, None] & (pair_dims < HEAD_DIM // 2)[None, :],
                other=0,
            )
        scores *= scale
        if HAS_SOFTCAP:
            # tanh(x) = 2 · sigmoid(2x) - 1.
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weights, axis=1)
        if pairs is None:
            mean = tl.dot(weights.to(query.dtype), value.to(query.dtype), mean * decay[:, None])
        else:
            low = value.to(tl.int8).to(key.dtype, bitcast=True)
            high = (value >> 8).to(tl.int8).to(key.dtype, bitcast=True)
            mean = tl.dot(weights.to(query.dtype), low.to(query.dtype), mean * decay[:, None])
            odd = tl.dot(weights.to(query.dtype), high.to(query.dtype), odd * decay[:, None])
        maximum = new_maximum
        number = next_number
    if pairs is not None:
        mean = tl.interleave(mean, odd)
    if sinks is not None:
        # A row that is split adds the sinks when its parts are merged.
        total = tl.where(parts == 1, total + group_sink_weights(sinks, heads, GROUP, maximum), total)
    mean = mean / total[:, None]
    if scales is not None:
        mean *= tl.load(scales + KV_HEADS + kv_head)

    if parts == 1:
        targets = out + row * out_stride + heads[:, None] * VALUE_DIM + dims[None, :]
        tl.store(targets, mean.to(out.dtype.element_ty), mask=is_head & is_dim)
    else:
        lines = (row * splits + split) * (KV_HEADS * GROUP) + heads
        tl.store(partials + lines[:, None] * VALUE_DIM + dims[None, :], mean, mask=is_head & is_dim)
        tl.store(logs + lines, maximum + tl.log2(total), mask=tl.arange(0, GROUP_ROWS) < GROUP)
        if LAST_ARRIVAL_MERGES:  # noqa: SIM102 – the outer condition is evaluated at compile time
            if arrives_last(arrivals + row * KV_HEADS + kv_head, parts):
                merge(
                    partials,
                    logs,
                    sinks,
                    out,
                    row,
                    splits,
                    parts,
                    kv_head * GROUP,
                    out_stride,
                    KV_HEADS * GROUP,
                    GROUP,
                    VALUE_DIM,
                    WIDTH,
                    MERGED,
                )


@triton.jit(do_not_specialize=["window", "splits", "min_blocks"])
def _merge_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    positions: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    logs: tl.tensor,
    sinks: tl.tensor | None,
    window: int,
    splits: int,
    min_blocks: int,
    out_stride: int,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGED: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    wait_for_previous(USE_PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    _, _, _, parts = _row_parts(tl.load(positions + row), window, splits, min_blocks, BLOCK)
    if parts > 1:
        merge(partials, logs, sinks, out, row, splits, parts, head, out_stride, HEADS, 1, HEAD_DIM, WIDTH, MERGED)


@triton.jit
def _row_parts(
    position: tl.tensor, window: int, splits: int, min_blocks: int, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return how a row is split: first block, end block, blocks per part, number of parts."""
    first_block = tl.maximum(position - window + 1, 0) // BLOCK
    end_block = position // BLOCK + 1
    blocks = end_block - first_block
    blocks_per_part = tl.maximum(tl.cdiv(blocks, splits), min_blocks)
    return first_block, end_block, blocks_per_part, tl.cdiv(blocks, blocks_per_part)
