"""Times of the products of a Llama-8B layer in int4, groups of 128, for different tilings.

python -m text_generation_bench.quantized_tilings [--rows 1,32]

Up to four rows: our kernel, fused with the operations next to the product. More rows: humming's kernels, alone. Weights are random
copies that together exceed the L2 cache; launches are captured in a CUDA graph. The best tilings come first.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from text_generation_bench.kernel_timing import (
    DEVICE,
    LAUNCHES,
    LLAMA_8B,
    Launch,
    Product,
    copies,
    empty,
    randn,
    timed,
)
from text_generation_bench.quantized import FORMATS, loaded, packed_parts, random_tensors
from text_generation_shard.engines.torch.kernels.matvec import MAX_ROWS
from text_generation_shard.engines.torch.kernels.operands import GatedActivation
from text_generation_shard.engines.torch.kernels.packed_matvec import PackedConfig, packed_matvec
from text_generation_shard.engines.torch.kernels.packed_weight import PackedWeight

WEIGHTS = FORMATS["int4"]
COMPILERS = 16
"""Kernels of humming that are compiled at the same time."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(word) for word in text.split(",")], default=[1, 32])
    for rows, product in itertools.product(parser.parse_args().rows, LLAMA_8B):
        (fused_products if rows <= MAX_ROWS else humming_products)(product, rows)


def fused_products(product: Product, rows: int) -> None:
    """Print the times of our kernel."""
    tensors = random_tensors(WEIGHTS, product.outputs, product.inputs)
    weight = loaded(WEIGHTS, product, packed_parts(WEIGHTS, product, tensors)).matvec_weight
    assert weight is not None
    size = weight.words.nbytes + weight.scales.nbytes
    weights = [replace(weight, words=weight.words.clone()) for _ in range(copies(size))]
    found: list[tuple[float, str]] = []
    for config in fused_tilings(product):
        try:
            found.append((timed(fused(product, weights, rows, config)), str(config)))
        except (RuntimeError, OutOfResources) as error:
            print(f"  {config}: {' '.join(str(error).split())[:100]}")
    print_found(product, rows, found, size)
    x, out = randn(rows, product.inputs), empty(rows, product.outputs)
    packed_matvec(x, weight, out)
    whole = slice(0, product.outputs), slice(0, product.inputs)
    expected = x.float() @ WEIGHTS.dequantize(tensors, whole).to(DEVICE, torch.float32).t()
    print(f"{'':38} relative error {float((out.float() - expected).norm() / expected.norm()):.1e}", flush=True)


def fused_tilings(product: Product) -> Iterator[PackedConfig]:
    """Yield the tilings in which a program loads 8 to 64 KiB ahead."""
    for block_n, num_warps, ahead in itertools.product((4, 8, 16), (2, 4, 8), (1, 2)):
        per_row = 512 * num_warps
        parts = -(-product.inputs // 2 // per_row)
        ahead_bytes = block_n * (2 if product.gated else 1) * per_row * ahead
        if ahead <= parts and 8192 <= ahead_bytes <= 65536 and per_row <= product.inputs:
            yield PackedConfig(block_n, num_warps, ahead)


def fused(product: Product, weights: list[PackedWeight], rows: int, config: PackedConfig) -> list[Launch]:
    """Return launches of the fused kernel that cycle through the weights."""
    x, residual = randn(rows, product.inputs), randn(rows, product.inputs, dtype=torch.float32)
    out = empty(rows, product.outputs // (2 if product.gated else 1))
    target = torch.zeros(rows, product.outputs, device=DEVICE)
    norm = (randn(product.inputs), 1e-5)
    kinds: dict[str, Callable[[PackedWeight], object]] = {
        "norm": lambda weight: packed_matvec(residual, weight, out, norm=norm, config=config),
        "gated": lambda weight: packed_matvec(
            residual, weight, out, norm=norm, activation=GatedActivation("silu"), config=config
        ),
        "add": lambda weight: packed_matvec(x, weight, target, add=True, config=config),
    }
    return [partial(kinds[product.kind], weights[index % len(weights)]) for index in range(LAUNCHES)]


def humming_products(product: Product, rows: int) -> None:
    """Print the times of humming, also of the tiling that is served."""
    parts = packed_parts(WEIGHTS, product, random_tensors(WEIGHTS, product.outputs, product.inputs))
    first = loaded(WEIGHTS, product, parts)
    layers = [first, *(loaded(WEIGHTS, product, parts) for _ in range(copies(first.weight.nbytes) - 1))]
    x, out = randn(rows, product.inputs), empty(rows, product.outputs)
    expected = first.packed_product(x, None).float()

    def error(tiling: str | None) -> float | str:
        try:
            y = first.packed_product(x, None, tiling=tiling).float()
        except (
            AssertionError,
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as problem:  # a tiling that humming or the device refuses
            return " ".join(str(problem).split())[:80]
        return float((y - expected).norm() / expected.norm())

    tilings = [None, *map(json.dumps, humming_tilings(rows))]
    with ThreadPoolExecutor(COMPILERS) as pool:
        errors = list(pool.map(error, tilings))
    torch.cuda.synchronize()
    found: list[tuple[float, str]] = []
    for tiling, problem in zip(tilings, errors, strict=True):
        if isinstance(problem, str):
            print(f"  {tiling}: {problem}")
            continue
        launches = [
            partial(layers[index % len(layers)].packed_product, x, out, tiling=tiling) for index in range(LAUNCHES)
        ]
        found.append((timed(launches), f"{tiling or 'as served'}, error {problem:.0e}"))
    print_found(product, rows, found, first.weight.nbytes)


def humming_tilings(rows: int) -> Iterator[dict[str, Any]]:
    """Yield tilings of humming's two kinds of kernels."""
    block = -(-rows // 16) * 16
    for stages, ctas, pdl in ((4, 1, True), (4, 2, False), (4, 2, True), (6, 2, True), (3, 3, True), (8, 1, True)):
        yield {
            "mma_type": "mma",
            "block_shape": (block, 128, 128),
            "warp_shape": (block, 64, 32),
            "num_stages": stages,
            "num_ctas_per_sm": ctas,
            "use_pdl": pdl,
        }
    for width, depth, stages, ctas in (
        (128, 64, 4, 2),
        (128, 64, 8, 2),
        (128, 64, 6, 3),
        (128, 64, 5, 4),
        (128, 128, 5, 2),
        (256, 64, 6, 2),
    ):
        yield {
            "mma_type": "wgmma",
            "block_shape": (block, width, depth),
            "warp_shape": (block, 32, 64),
            "num_stages": stages,
            "num_ctas_per_sm": ctas,
            "use_warp_spec": True,
            "use_tma": True,
            "use_pdl": True,
        }


def print_found(product: Product, rows: int, found: list[tuple[float, str]], size: int) -> None:
    """Print times and bandwidths, the best first."""
    for us, name in sorted(found):
        print(f"{product.title:38} {rows:3} {us:8.1f} µs {size / us / 1e6:6.2f} TB/s  {name}", flush=True)


if __name__ == "__main__":
    main()
