"""Times of the CUDA kernels on this device: µs, and the share of the bandwidth of a copy.

python -m text_generation_bench.kernels [--only matvec,attention,elementwise,gemm,experts,states,latents] [--sweep [--rows 1,2,4] [--num-shard 2]] [--flashinfer]

Each operation is captured 32 times in a CUDA graph, with alternating weights or caches that together exceed the L2 cache (except
SmolLM2's), like the layers of a model. The time is that of a replay, measured by events, divided by 32. --sweep tries the tilings
of each product with one to four rows and prints the best as lines for TUNED in kernels/matvec.py. States are checked against plain torch before they are timed. --flashinfer compares with
FlashInfer's decode attention, if installed; its first run may compile for minutes.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from text_generation_bench import expert_kernels, latent_kernels, state_kernels
from text_generation_bench.kernel_timing import (
    DEVICE,
    DTYPE,
    HEAD,
    LAUNCHES,
    LLAMA_8B,
    PRODUCTS,
    Launch,
    Product,
    Table,
    copies,
    empty,
    ints,
    one_each,
    randn,
    timed,
)
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.kernels import activation, embedding, matvec, norm, rope
from text_generation_shard.engines.torch.kernels.decode_attention import DecodeAttention
from text_generation_shard.engines.torch.kernels.decode_launch import Merge, config_for
from text_generation_shard.engines.torch.kernels.greedy import GreedySampler
from text_generation_shard.engines.torch.kernels.operands import DecodeStep, GatedActivation, RopeStep
from text_generation_shard.engines.torch.layers.rope import Rope, RotaryEmbedding

EPS = 1e-5
FEW_ROWS = (1, 2, 3, 4)


def fused(product: Product, rows: int) -> list[Launch]:
    """Return launches of the fused kernel with alternating weights; operands are random."""
    x, residual = randn(rows, product.inputs), randn(rows, product.inputs, dtype=torch.float32)
    norm_weight, out = randn(product.inputs), empty(rows, product.outputs)
    target, inner = torch.zeros_like(out, dtype=torch.float32), empty(rows, product.outputs // 2)
    calls: dict[str, Callable[[Tensor], object]] = {
        "norm": lambda weight: matvec.matvec(residual, weight, out, norm=(norm_weight, EPS)),
        "gated": lambda weight: matvec.matvec(
            residual, weight, inner, norm=(norm_weight, EPS), activation=GatedActivation("silu")
        ),
        "add": lambda weight: matvec.matvec(x, weight, target, add=True),
        "plain": lambda weight: matvec.matvec(x, weight, target),
    }
    return one_each(product.weights(), calls[product.kind])


def matvecs(table: Table) -> None:
    for product, rows in itertools.product(PRODUCTS, FEW_ROWS):
        table.row(product.title, rows, timed(fused(product, rows)), product.num_bytes)
        table.row("  torch.mm alone", rows, timed(product.reference(rows)), product.num_bytes)


def tilings(product: Product, rows: int) -> Iterator[matvec.MatvecConfig]:
    """Yield the tilings in which a thread reads 4 to 16 times 16 bytes of the weight."""
    loads_of_a_row = max(product.inputs // 256, 1) * (2 if product.gated else 1)
    orders: tuple[matvec.Order, ...] = ("free", "ahead", "pdl")
    for block_n, num_warps, order in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), orders):
        loads = block_n * loads_of_a_row / num_warps
        if 4 <= loads <= (16 if rows == 1 else 8):
            yield matvec.MatvecConfig(block_n, num_warps, order)


def sweep(table: Table, rows_tried: Sequence[int], num_shard: int) -> None:
    products = [product.part(num_shard) for product in (*LLAMA_8B, HEAD)]
    for product, rows in itertools.product(products, rows_tried):
        key = (rows, product.outputs, product.inputs)
        launches, found = fused(product, rows), []
        before = matvec.config_for(rows, product.outputs, product.inputs, gated=product.gated)
        table.row(f"{product.title} as it is", rows, timed(launches), product.num_bytes)
        for config in tilings(product, rows):
            matvec.TUNED[key] = config
            found.append((timed(launches), config))
        matvec.TUNED[key] = before
        for us, config in sorted(found, key=lambda pair: pair[0])[:4]:
            table.row(
                f"  {config.block_n} a program, {config.num_warps} warps, {config.order}", rows, us, product.num_bytes
            )
        best = min(found, key=lambda pair: pair[0])[1]
        print(f"    {key}: MatvecConfig({best.block_n}, {best.num_warps}, {best.order!r}),")


CONTEXTS = ((1, 600), (8, 600), (16, 600), (32, 600), (128, 600), (256, 600), (1, 32768), (6, 20_000))
UNEVEN = ((4, 1_000), (32, 1_000))
LONGEST = 100_000
"""Tokens of the first row of `UNEVEN`."""
HEADS = ((8, 4, 128), (3, 3, 64))
"""KV heads, query heads per KV head, head_dim."""


@dataclass(frozen=True)
class Attended:
    """Rows of equal length, but for the first one, over a pool of random keys and values."""

    rows: int
    context: int
    num_kv_heads: int
    group: int
    head_dim: int
    longest: int = 0
    """Tokens of the first row; 0: as many as the others have."""

    @property
    def lengths(self) -> list[int]:
        return [self.longest or self.context, *[self.context] * (self.rows - 1)]

    @property
    def blocks(self) -> int:
        return -(-max(self.lengths) // BLOCK_SIZE)

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths) * 2 * self.num_kv_heads * self.head_dim * 2

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return caches of the layers, queries, and block tables in random order."""
        pool = self.rows * self.blocks
        shape = (pool + 1, 2, self.num_kv_heads, BLOCK_SIZE, self.head_dim)
        caches = randn(copies(2 * math.prod(shape)), *shape)
        queries = randn(self.rows, self.num_kv_heads * self.group, self.head_dim)
        return caches, queries, torch.randperm(pool, device=DEVICE).to(torch.int32).view(self.rows, self.blocks)


def attentions(table: Table, *, flashinfer: bool) -> None:
    for heads, (rows, context) in itertools.product(HEADS, CONTEXTS):
        attend(table, Attended(rows, context, *heads), flashinfer=flashinfer)
    for heads, (rows, context) in itertools.product(HEADS, UNEVEN):
        attend(table, Attended(rows, context, *heads, longest=LONGEST), flashinfer=False)


def attend(table: Table, case: Attended, *, flashinfer: bool) -> None:
    caches, queries, block_tables = case.operands()
    rows, num_heads, head_dim = queries.shape
    step = DecodeStep(ints([length - 1 for length in case.lengths]), ints(range(rows)), block_tables, head_dim**-0.5)
    out = empty(rows, num_heads * head_dim)
    name = f"attention {case.num_kv_heads} × {case.group} × {head_dim}, {case.context} tokens"
    if case.longest:
        name += f", one of {case.longest}"
    multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    found = config_for(rows, num_heads, case.num_kv_heads, head_dim, multiprocessors)
    other: Merge = "last arrival" if found.merge == "second kernel" else "second kernel"
    for title, config in ((name, found), (f"  {other} merges", replace(found, merge=other))):
        kernel = DecodeAttention(num_heads, case.num_kv_heads, head_dim, rows, DEVICE, config=config)
        call = partial(lambda kernel, cache: kernel.run(queries, cache, step, None, out), kernel)
        table.row(title, rows, timed(one_each(caches, call)), case.num_bytes)
        fp8 = one_each(caches.to(torch.float8_e4m3fn), call)
        table.row("  the same, FP8 cache", rows, timed(fp8), case.num_bytes // 2)
    if not flashinfer:
        return
    for title, tensor_cores in (("  FlashInfer", False), ("  FlashInfer, tensor cores", True)):
        try:
            us = timed(flashinfer_launches(case, caches, queries, block_tables, tensor_cores=tensor_cores))
        except Exception as error:  # noqa: BLE001 – an error of FlashInfer; the table continues without it
            table.failed(title, rows, error)
        else:
            table.row(title, rows, us, case.num_bytes)


def flashinfer_launches(
    case: Attended, caches: Tensor, queries: Tensor, block_tables: Tensor, *, tensor_cores: bool
) -> list[Launch]:
    indptr, indices = ints(range(0, (case.rows + 1) * case.blocks, case.blocks)), block_tables.flatten()
    last_page = ints([(case.context - 1) % BLOCK_SIZE + 1] * case.rows)
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last_page,
    )
    wrapper.plan(
        indptr.clone(),
        indices.clone(),
        last_page.clone(),
        queries.shape[1],
        case.num_kv_heads,
        case.head_dim,
        BLOCK_SIZE,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    out = torch.empty_like(queries)
    return one_each(caches, lambda cache: wrapper.run(queries, cache, out=out))


def elementwise(table: Table) -> None:
    """Time the kernels of a Llama-8B layer besides its products, and greedy sampling over SmolLM2's vocabulary."""
    rotary = RotaryEmbedding(Rope("default", 10_000.0), 128, torch.device(DEVICE))
    rotary.fill_table(8192)
    embeddings = randn(49152, 4096)
    for rows in (1, 32, 256, 8192):
        layer_kernels(table, rows, rotary.table, embeddings)
    for rows in (1, 32, 256):
        greedy_sampling(table, rows, len(embeddings))


def layer_kernels(table: Table, rows: int, angles: Tensor, embeddings: Tensor) -> None:
    """Time the kernels with `rows` tokens of one sequence."""
    hidden, inner, heads, kv_heads, head_dim = 4096, 14336, 32, 8, 128
    blocks = -(-rows // BLOCK_SIZE)
    residual, update, out = randn(rows, hidden, dtype=torch.float32), randn(rows, hidden), empty(rows, hidden)
    weight, ids, slots = randn(hidden), ints(range(rows)), ints([0] * rows)
    gate_up, active = randn(rows, 2 * inner), empty(rows, inner)
    qkv, layer = randn(rows, (heads + 2 * kv_heads) * head_dim), empty(blocks, 2, kv_heads, BLOCK_SIZE, head_dim)
    queries = qkv[:, : heads * head_dim]
    step = RopeStep(ids, slots, ints(range(blocks)).view(1, -1), angles, heads, kv_heads, head_dim, EPS)
    work: list[tuple[str, Launch, int]] = [
        ("embed", lambda: embedding.embed(ids, slots, ids, embeddings, residual), rows * hidden * 6),
        ("rms_norm", lambda: norm.rms_norm(residual, weight, EPS, out), rows * hidden * 6),
        ("add_rms_norm", lambda: norm.rms_norm(residual, weight, EPS, out, update), rows * hidden * 12),
        ("rotate_and_append", lambda: rope.rotate_and_append(qkv, queries, step, layer, None), 2 * qkv.nbytes),
        ("activate", lambda: activation.activate(gate_up, GatedActivation("silu"), active), rows * inner * 6),
    ]
    for name, launch, num_bytes in work:
        table.row(name, rows, timed([launch] * LAUNCHES), num_bytes)


def greedy_sampling(table: Table, rows: int, vocabulary: int) -> None:
    logits, greedy = randn(rows, vocabulary, dtype=torch.float32), GreedySampler(rows, vocabulary, DEVICE)
    slots, last, sampled = ints(range(rows)), ints([0] * rows), ints([0] * rows)
    logprobs = empty(rows, dtype=torch.float32)
    us = timed([lambda: greedy.run(logits, slots, last, sampled, logprobs)] * LAUNCHES)
    table.row(f"greedy sampling of {vocabulary}", rows, us, logits.nbytes)


MANY_ROWS = (1, 32, 128, 256, 640, 2048, 4096, 8192)


def gemms(table: Table) -> None:
    """Time cuBLAS on a Llama-8B layer, the LM head with float32 logits, and a product added to a float32 residual."""
    for product in (*LLAMA_8B, HEAD):
        weights = product.weights()
        for rows in MANY_ROWS:
            gemm(table, product, weights, rows)


def gemm(table: Table, product: Product, weights: Tensor, rows: int) -> None:
    x, out = randn(rows, product.inputs), empty(rows, product.outputs)
    exact = torch.zeros_like(out, dtype=torch.float32)
    wide = torch.float32
    ways: dict[str, Callable[[Tensor], object]] = {"torch.mm": lambda weight: torch.mm(x, weight.T, out=out)}
    if product.kind == "plain":
        ways["  torch.mm, float32 out"] = lambda weight: torch.mm(x, weight.T, out_dtype=wide, out=exact)
    if product.kind == "add":
        ways["  torch.addmm, float32 in place"] = lambda weight: torch.addmm(
            exact, x, weight.T, out_dtype=wide, out=exact
        )
    for way, call in ways.items():
        name = f"{way} [{product.outputs} × {product.inputs}]"
        try:
            us = timed(one_each(weights, call, LAUNCHES if rows <= 256 else 4))
        except RuntimeError as error:
            table.failed(name, rows, error)
        else:
            flops = 2 * rows * product.outputs * product.inputs
            table.row(name, rows, us, product.num_bytes + x.nbytes + out.nbytes, flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="matvec,attention,elementwise,gemm,experts,states,latents")
    parser.add_argument("--sweep", action="store_true", help="only try tilings of the products with few rows")
    parser.add_argument("--rows", default="1", help="numbers of rows that --sweep tries")
    parser.add_argument("--num-shard", type=int, default=1, help="ranks that share the products of --sweep")
    parser.add_argument("--flashinfer", action="store_true")
    arguments = parser.parse_args()
    table = Table()
    if arguments.sweep:
        sweep(table, [int(rows) for rows in arguments.rows.split(",")], arguments.num_shard)
        return
    parts: dict[str, Callable[[Table], None]] = {
        "matvec": matvecs,
        "attention": lambda table: attentions(table, flashinfer=arguments.flashinfer),
        "elementwise": elementwise,
        "gemm": gemms,
        "experts": expert_kernels.mixtures,
        "states": state_kernels.states,
        "latents": partial(latent_kernels.latents, flashinfer=arguments.flashinfer),
    }
    for name in arguments.only.split(","):
        parts[name](table)


if __name__ == "__main__":
    main()
