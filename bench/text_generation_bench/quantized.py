"""Times and errors of the products of a Llama-8B layer with packed weights on this device, against cuBLAS in bfloat16.

python -m text_generation_bench.quantized [--rows 1,32,128,256,2048] [--formats int4,int4-zero,fp8-block,mxfp4]

Weights are random. Each product is captured in a CUDA graph with copies of its weights that together exceed the L2 cache. Columns:
the time of cuBLAS; of `HummingLinear`, and its speed as a multiple of cuBLAS'; the same of the packed product alone; for FP8 blocks
also of torch's product of FP8 blocks, with the quantization of the activations. The last columns are the error of the packed
product against that in float32 with dequantized weights, relative to its norm, and whether 20 runs and a run with more rows agree
to the bit. --invariant measures humming's batch-invariant kernels as the packed product.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from torch import Tensor

from text_generation_bench.kernel_timing import (
    DEVICE,
    DTYPE,
    LAUNCHES,
    LLAMA_8B,
    Product,
    copies,
    empty,
    one_each,
    randn,
    timed,
)
from text_generation_shard.engines.torch.layers.linear import Projection
from text_generation_shard.engines.torch.layers.quantized.humming import HummingLinear
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange
from text_generation_shard.engines.torch.weights.quantization.format import WeightFormat
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import Mxfp4Format
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import FP8, Fp8BlockFormat
from text_generation_shard.engines.torch.weights.quantization.formats.packed_integers import PackedIntegerFormat

FORMATS: dict[str, WeightFormat] = {
    "int4": PackedIntegerFormat(bits=4, group_size=128, symmetric=True),
    "int4-zero": PackedIntegerFormat(bits=4, group_size=128, symmetric=False),
    "fp8-block": Fp8BlockFormat((128, 128)),
    "mxfp4": Mxfp4Format(),
}
NAME = "model.layers.0.mlp.down_proj.weight"
INVARIANT = '{"use_batch_invariant": true}'
"""The option of humming that makes a row of a result independent of the other rows: half as fast at one row."""


def main() -> None:
    """Print the table."""
    options = _options()
    print(
        f"{'format':10} {'product':28} {'rows':>5} {'cuBLAS µs':>9} {'ours':>8} {'×':>5} {'packed':>8} {'×':>5}  error  bits"
    )
    totals: dict[tuple[str, int], list[float]] = {}
    for name in options.formats:
        for product in LLAMA_8B:
            measure(name, product, options.rows, totals, INVARIANT if options.invariant else None)
    print("\na layer: cuBLAS µs, ours, packed, and their speed as a multiple of cuBLAS'")
    for (name, rows), (cublas, ours, free) in totals.items():
        print(f"{name:10} {rows:5} {cublas:9.1f} {ours:8.1f} {free:8.1f} {cublas / ours:6.2f} {cublas / free:6.2f}")


def measure(
    name: str, product: Product, rows: list[int], totals: dict[tuple[str, int], list[float]], options: str | None
) -> None:
    """Print a line for each number of rows."""
    weights = FORMATS[name]
    tensors = random_tensors(weights, product.outputs, product.inputs)
    parts = packed_parts(weights, product, tensors)
    started = time.monotonic()
    layer = loaded(weights, product, parts)
    layer(randn(1, product.inputs))
    torch.cuda.synchronize()
    print(f"{name:10} {product.title}: compiled in {time.monotonic() - started:.1f} s", flush=True)
    layers = [layer, *(loaded(weights, product, parts) for _ in range(copies(layer.weight.nbytes) - 1))]
    dense = weights.dequantize(tensors, (slice(0, product.outputs), slice(0, product.inputs))).to(DEVICE)
    for count in rows:
        x, out = randn(count, product.inputs), empty(count, product.outputs)
        cublas = timed(product.reference(count))
        ours = timed([partial(layers[index % len(layers)], x, out) for index in range(LAUNCHES)])
        free = timed(
            [partial(layers[index % len(layers)].packed_product, x, out, options) for index in range(LAUNCHES)]
        )
        expected = x.float() @ dense.float().t()
        layer.packed_product(x, out, options)
        error = float((out.float() - expected).norm() / expected.norm())
        runs = all(torch.equal(out, layer.packed_product(x, None, options)) for _ in range(20))
        more = layer.packed_product(torch.cat((x, x)), None, options)[:count]
        bits = f"{'same' if runs else 'DIFFER'}/{'same' if torch.equal(out, more) else 'differ'}"
        print(
            f"{name:10} {product.title:28} {count:5} {cublas:9.1f} {ours:8.1f} {cublas / ours:5.2f} {free:8.1f}"
            f" {cublas / free:5.2f}  {error:.1e}  {bits}",
            flush=True,
        )
        total = totals.setdefault((name, count), [0.0, 0.0, 0.0])
        for place, value in enumerate((cublas, ours, free)):
            total[place] += value
        if name == "fp8-block":
            block_product(product, tensors, x, cublas, expected)


def block_product(product: Product, tensors: dict[str, Tensor], x: Tensor, cublas: float, expected: Tensor) -> None:
    """Print the time of torch's product of FP8 blocks, activations quantized by 128 inputs."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    weight, scale = tensors["weight"].to(DEVICE), tensors["scale"].to(DEVICE)

    def multiply(of: Tensor) -> Tensor:
        groups = x.view(x.shape[0], -1, 128).float()
        x_scale = groups.abs().amax(2) / 448
        x8 = (groups / x_scale.unsqueeze(2)).to(FP8).view_as(x)
        x_scale = x_scale.t().contiguous().t()
        return scaled_mm(
            x8,
            of.t(),
            scale_a=[x_scale],
            scale_recipe_a=[ScalingType.BlockWise1x128],
            swizzle_a=[SwizzleType.NO_SWIZZLE],
            scale_b=[scale.t()],
            scale_recipe_b=[ScalingType.BlockWise128x128],
            swizzle_b=[SwizzleType.NO_SWIZZLE],
            output_dtype=DTYPE,
        )

    try:
        y = multiply(weight)
        us = timed(one_each(weight.expand(2, *weight.shape).contiguous(), multiply))
        error = float((y.float() - expected).norm() / expected.norm())
        print(f"{'  scaled_mm by blocks, unfused quantization':45} {us:18.1f} {cublas / us:5.2f} {error:16.1e}")
    except (RuntimeError, ValueError, TypeError) as error:
        print(f"  scaled_mm by blocks: {' '.join(str(error).split())[:150]}")


def new_layer(weights: WeightFormat, product: Product) -> HummingLinear:
    sizes = ShardRange.whole(product.outputs), ShardRange.whole(product.inputs)
    return HummingLinear([Projection(NAME.removesuffix(".weight"), *sizes)], weights, DEVICE, DTYPE, bias=False)


def packed_parts(weights: WeightFormat, product: Product, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a layer on the device, read as from a checkpoint."""
    parts = {}
    for name, part in new_layer(weights, product).named_parameters().items():
        assert part.packed is not None
        parts[name] = part.packed.read(tensors, slice(0, part.tensor.shape[0])).to(DEVICE)
    return parts


def loaded(weights: WeightFormat, product: Product, parts: dict[str, Tensor]) -> HummingLinear:
    """Return a layer with these parameters."""
    layer = new_layer(weights, product)
    for name, part in layer.named_parameters().items():
        part.tensor.copy_(parts[name])
    layer.process_weights_after_loading()
    return layer


def random_tensors(weights: WeightFormat, outputs: int, inputs: int) -> dict[str, Tensor]:
    """Return random tensors that stand for a weight, in host memory."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for role, stored in weights.stored(NAME, (outputs, inputs)).items():
        shape, dtype = stored.shapes[0], stored.dtypes[0]
        if stored.optional:
            continue
        if dtype == torch.int32:
            tensors[role] = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).int()
        elif dtype == torch.uint8:
            low, high = (118, 122) if role == "scale" else (0, 256)
            tensors[role] = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
        else:
            values = torch.randn(shape, generator=generator)
            tensors[role] = values.to(FP8) if dtype == FP8 else values.abs().mul_(0.01).add_(0.001).to(DTYPE).float()
    return tensors


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=lambda text: [int(word) for word in text.split(",")], default=[1, 32, 128, 256, 2048]
    )
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    parser.add_argument("--invariant", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
