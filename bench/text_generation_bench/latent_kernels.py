"""Decode attention over latent rows, for the kernel benchmark: its error against the formula in float64, its times, FlashInfer's beside."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace

import torch
from torch import Tensor

from text_generation_bench.kernel_timing import DEVICE, DTYPE, Table, copies, empty, ints, one_each, randn, timed
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.kernels.decode_attention import DecodeAttention
from text_generation_shard.engines.torch.kernels.operands import DecodeStep

RANK, ROTATED = 512, 64
"""Columns of a row of DeepSeek V3: its value, and the others."""
HEADS = (128, 16)
"""Heads of one rank of 1 and of 8."""
CONTEXTS = ((1, 600), (32, 600), (128, 600), (256, 600), (32, 8192), (1, 32768))
MOST_ERROR = 1e-2


def latents(table: Table, *, flashinfer: bool) -> None:
    """Check and time each shape. Raises SystemExit if a result is wrong."""
    for heads, (rows, context) in itertools.product(HEADS, CONTEXTS):
        attend(table, heads, rows, context, flashinfer=flashinfer)


def attend(table: Table, heads: int, rows: int, context: int, *, flashinfer: bool) -> None:
    blocks, nbytes = -(-context // BLOCK_SIZE), rows * context * (RANK + ROTATED) * DTYPE.itemsize
    caches = randn(copies(nbytes), rows * blocks + 1, 1, 1, BLOCK_SIZE, RANK + ROTATED)
    queries, out = randn(rows, heads, RANK + ROTATED), empty(rows, heads * RANK)
    tables = torch.randperm(rows * blocks, device=DEVICE).to(torch.int32).view(rows, blocks)
    step = DecodeStep(ints([context - 1] * rows), ints(range(rows)), tables, 192**-0.5)
    kernel = DecodeAttention(heads, 1, RANK + ROTATED, rows, DEVICE, latent=RANK)

    def call(cache: Tensor) -> None:
        kernel.run(queries, cache, step, None, out)

    call(caches[0])
    check(queries[:1], caches[0], replace(step, positions=step.positions[:1]), out[:1])
    table.row(f"latent, {heads} heads, {context} tokens", rows, timed(one_each(caches, call)), nbytes)
    if flashinfer:
        launch_flashinfer(table, caches, queries, tables, context)


def check(queries: Tensor, cache: Tensor, step: DecodeStep, out: Tensor) -> None:
    keys = cache[step.block_tables[0].long()].view(-1, RANK + ROTATED)[: int(step.positions[0]) + 1].double()
    expected = (queries[0].double() @ keys.t() * step.scale).softmax(-1) @ keys[:, :RANK]
    error = float((out.view(-1, RANK).double() - expected).norm() / expected.norm())
    if not error < MOST_ERROR:
        raise SystemExit(f"attention over latent rows is wrong: relative error {error:.1e}")


def launch_flashinfer(table: Table, caches: Tensor, queries: Tensor, tables: Tensor, context: int) -> None:
    rows, heads, _ = queries.shape
    title = f"  FlashInfer, {heads} heads, {context} tokens"
    try:
        indptr = ints(range(rows + 1))
        pages, lengths = indptr * tables.shape[1], ints([context] * rows)
        wrapper = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(
            torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE),
            use_cuda_graph=True,
            qo_indptr=indptr.clone(),
            kv_indptr=pages.clone(),
            kv_indices=tables.flatten(),
            kv_len_arr=lengths.clone(),
        )
        shape = heads, RANK, ROTATED, BLOCK_SIZE
        wrapper.plan(indptr, pages, tables.flatten(), lengths, *shape, False, 192**-0.5, DTYPE, DTYPE)  # noqa: FBT003 – as in FlashInfer
        plain, rotated = queries[..., :RANK].contiguous(), queries[..., RANK:].contiguous()
        us = timed(
            one_each(
                caches[:, :, 0, 0], lambda cache: wrapper.run(plain, rotated, cache[..., :RANK], cache[..., RANK:])
            )
        )
    except Exception as error:  # noqa: BLE001 – an error of FlashInfer; the table continues without it
        table.failed(title, rows, error)
    else:
        table.row(title, rows, us, rows * context * (RANK + ROTATED) * DTYPE.itemsize)
