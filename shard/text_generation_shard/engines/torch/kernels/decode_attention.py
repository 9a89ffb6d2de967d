"""Attention of one query token per row over the paged cache: flash decoding, with the keys of all rows divided over programs.

A program handles one KV head, and about an equal share of the visible blocks of all rows: a part of a long row, or several short rows
(`divide`). All query heads that share the KV head are the rows of one matrix product (grouped-query attention, Ainslie et al. 2023), so
keys and values are read once. If a row is divided, each program writes its softmax-weighted mean and the log of its sum of weights, and
these partial results are merged (Flash-Decoding, Dao et al. 2023; the running maximum and sum are from FlashAttention, Dao et al. 2022):
by a second kernel if there are few rows, else by the last program of a row.

Lengths and block tables are read on the device. The number of programs does not depend on the lengths, so that a CUDA graph can be
replayed with others. How a row is divided depends on the lengths of all rows, and so does the rounding of its result.
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
    blocks_of,
    config_for,
    divide,
    group_rows,
    parts_of,
    row_places,
)
from text_generation_shard.engines.torch.kernels.operands import DecodeStep
from text_generation_shard.engines.torch.kernels.partial_results import LOG2_E, group_sink_weights, merge
from text_generation_shard.engines.torch.kernels.pdl import pdl, wait_for_previous

NO_WINDOW = 1 << 30
"""A window longer than any sequence."""

LATENT_HEADS = 64
"""Most query heads of a program that reads latent rows: eight warps hold their results."""


class DecodeAttention:
    """Decode attention for layers of one shape, with the workspaces for divided rows.

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
        self._max_rows = max_rows
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim, self._value_dim = head_dim, latent or head_dim
        self._group_rows = group_rows(num_heads, num_kv_heads)
        self._width = triton.next_power_of_2(self._value_dim)
        self._rest = max(16, triton.next_power_of_2(head_dim - latent)) if latent else 0
        gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        multiprocessors = gpu.multi_processor_count if gpu else 1
        shape = num_heads, num_kv_heads, head_dim, multiprocessors, 8 if latent else 4
        self._configs = [config or config_for(rows, *shape) for rows in range(1, max_rows + 1)]
        # See `parts_of`.
        lines = max(config.programs + rows for rows, config in enumerate(self._configs, start=1))
        self._partials = torch.empty(lines, num_heads, self._value_dim, dtype=torch.float32, device=device)
        self._logs = torch.empty(lines, num_heads, dtype=torch.float32, device=device)
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
        config, places = self._configs[rows - 1], row_places(rows, self._max_rows)
        # Pairs of FP8 numbers. Float32 queries would be rounded to float16.
        pairs = cache_layer.view(torch.int16) if cache_layer.itemsize == 1 and queries.itemsize == 2 else None
        _attend_kernel[(self._num_kv_heads, config.programs)](
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
            rows,
            queries.stride(0),
            step.block_tables.stride(0),
            out.stride(0),
            ROWS=places,
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
        if config.programs > 1 and config.merge == "second kernel":
            _merge_kernel[(self._num_heads, rows)](
                step.positions,
                out,
                self._partials,
                self._logs,
                sinks,
                NO_WINDOW if window is None else window,
                rows,
                config.programs,
                out.stride(0),
                ROWS=places,
                BLOCK=BLOCK_SIZE,
                HEADS=self._num_heads,
                HEAD_DIM=self._value_dim,
                WIDTH=self._width,
                MERGED=FLOATS_PER_WARP * 4,
                num_warps=4,
                **pdl(queries),
            )


@triton.jit(do_not_specialize=["window", "num_rows", "table_stride"])
def _attend_kernel(  # noqa: C901, PLR0913, PLR0915 – a kernel's arguments are flat, and its loops cannot be divided
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
    num_rows: int,
    query_stride: int,
    table_stride: int,
    out_stride: int,
    ROWS: tl.constexpr,
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
    kv_head, program = tl.program_id(0), tl.program_id(1)
    ends, share = divide(positions, window, num_rows, tl.num_programs(1), ROWS, BLOCK)
    # The program's part of the list of all blocks.
    begin = program * share
    end = tl.minimum(begin + share, tl.max(ends, axis=0))
    if begin >= end:
        return

    heads = kv_head * GROUP + tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, WIDTH)
    is_head = tl.arange(0, GROUP_ROWS)[:, None] < GROUP
    is_dim = (dims < VALUE_DIM)[None, :]
    offsets = tl.arange(0, BLOCK)
    keys_of_head = cache_layer if REST else cache_layer + kv_head * (BLOCK * HEAD_DIM)
    block_numbers: tl.constexpr = (1 if REST else 2 * KV_HEADS) * BLOCK * HEAD_DIM
    if scales is not None:
        scale *= tl.load(scales + kv_head)
    first_row = tl.sum((ends <= begin).to(tl.int32), axis=0)
    last_row = tl.sum((ends < end).to(tl.int32), axis=0)
    for row in range(first_row, last_row + 1):
        start, stop = blocks_of(ends, row, ROWS)
        position = tl.load(positions + row)
        table = block_tables + tl.load(slots + row).to(tl.int64) * table_stride
        query_rows = queries + row * query_stride + heads[:, None] * HEAD_DIM
        query = tl.load(query_rows + dims[None, :], mask=is_head & is_dim, other=0.0)
        if REST:
            rest = VALUE_DIM + tl.arange(0, REST)
            is_rest = (rest < HEAD_DIM)[None, :]
            query_rest = tl.load(query_rows + rest[None, :], mask=is_head & is_rest, other=0.0)
        # Scores are in units of log 2, because the hardware computes exp2.
        row_scale = scale
        maximum = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_ROWS], tl.float32)
        if pairs is None:
            mean = tl.zeros([GROUP_ROWS, WIDTH], tl.float32)
        else:
            # In float16 FP8 numbers are exact and the conversion is one instruction for two numbers. Queries in bfloat16 may exceed it.
            largest = tl.maximum(tl.max(tl.abs(query.to(tl.float32))), 1e-30)
            query = (query / largest).to(tl.float16)
            row_scale *= largest
            mean = tl.zeros([GROUP_ROWS, WIDTH // 2], tl.float32)
            odd = tl.zeros([GROUP_ROWS, WIDTH // 2], tl.float32)
            pair_dims = tl.arange(0, WIDTH // 2)
        shift = tl.maximum(position - window + 1, 0) // BLOCK - start
        first_block = shift + tl.maximum(begin, start)
        # The padding of a row has no keys, and no places in the block table.
        end_block = tl.minimum(shift + tl.minimum(end, stop), position // BLOCK + 1)
        # Block numbers are loaded one iteration ahead.
        number = tl.load(table + first_block)
        for block in range(first_block, end_block):
            next_number = tl.load(table + tl.minimum(block + 1, end_block - 1))
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
            scores *= row_scale
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
        first_part, parts = parts_of(start, stop, share)
        if sinks is not None:
            # A row that is divided adds the sinks when its parts are merged.
            total = tl.where(parts == 1, total + group_sink_weights(sinks, heads, GROUP, maximum), total)
        mean = mean / total[:, None]
        if scales is not None:
            mean *= tl.load(scales + KV_HEADS + kv_head)

        if parts == 1:
            targets = out + row * out_stride + heads[:, None] * VALUE_DIM + dims[None, :]
            tl.store(targets, mean.to(out.dtype.element_ty), mask=is_head & is_dim)
        else:
            lines = (program + row) * (KV_HEADS * GROUP) + heads
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
                        first_part + row,
                        parts,
                        kv_head * GROUP,
                        out_stride,
                        KV_HEADS * GROUP,
                        GROUP,
                        VALUE_DIM,
                        WIDTH,
                        MERGED,
                    )


@triton.jit(do_not_specialize=["window", "num_rows", "programs"])
def _merge_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    positions: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    logs: tl.tensor,
    sinks: tl.tensor | None,
    window: int,
    num_rows: int,
    programs: int,
    out_stride: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGED: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    wait_for_previous(USE_PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    ends, share = divide(positions, window, num_rows, programs, ROWS, BLOCK)
    start, stop = blocks_of(ends, row, ROWS)
    first, parts = parts_of(start, stop, share)
    if parts > 1:
        line = first + row
        merge(partials, logs, sinks, out, row, line, parts, head, out_stride, HEADS, 1, HEAD_DIM, WIDTH, MERGED)
