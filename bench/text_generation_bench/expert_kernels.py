"""Times of the grouped product of a mixture of experts, its errors, and torch's grouped_mm beside it; see kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_bench.kernel_timing import Launch, Table, randn, timed
from text_generation_shard.engines.torch.kernels import experts as kernels
from text_generation_shard.engines.torch.kernels.operands import GatedActivation, Routing
from text_generation_shard.engines.torch.layers.expert_linear import (
    ExpertLinear,
    Routed,
    choose_top_k,
    experts_by_loop,
)

MAX_ERROR = 2e-2
ROWS = (1, 32, 128, 256, 2048)
LAYERS = 2
"""Layers whose weights alternate: together more than the L2 cache, at any number of rows."""
LAUNCHES = 8

OURS = partial(kernels.experts, product=kernels.grouped_product)
Layer = tuple[ExpertLinear, ExpertLinear]


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer of a model."""

    name: str
    experts: int
    experts_each: int
    hidden: int
    inner: int
    activation: GatedActivation
    bias: bool

    def linear(self, outputs: int, inputs: int) -> ExpertLinear:
        weight = randn(self.experts, outputs, inputs).mul_(inputs**-0.5)
        return ExpertLinear(weight, randn(self.experts, outputs) if self.bias else None)

    def layer(self) -> Layer:
        return self.linear(2 * self.inner, self.hidden), self.linear(self.hidden, self.inner)

    def routed(self, rows: int) -> Routed:
        return choose_top_k(randn(rows, self.experts, dtype=torch.float32), Routing(self.experts_each, normalize=True))

    def num_bytes(self, ids: Tensor) -> int:
        """Return the bytes of the weights of the experts with tokens."""
        return ids.unique().numel() * 3 * self.hidden * self.inner * 2  # type: ignore[no-untyped-call, no-any-return]

    def flops(self, ids: Tensor) -> int:
        return ids.numel() * 6 * self.hidden * self.inner


MIXTURES = (
    Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768, GatedActivation("silu"), bias=False),
    Mixture("gpt-oss-20b", 32, 4, 2880, 2880, GatedActivation("clamped_swiglu"), bias=True),
    Mixture("Mixtral-8x7B", 8, 2, 4096, 14336, GatedActivation("silu"), bias=False),
)


def mixtures(table: Table) -> None:
    for mixture in MIXTURES:
        layers = [mixture.layer() for _ in range(LAYERS)]
        for rows in ROWS:
            x, (ids, weights) = randn(rows, mixture.hidden), mixture.routed(rows)
            error = relative_error(mixture, layers[0], x, ids, weights)
            title = f"{mixture.name}, error {error:.1e}" + (" TOO LARGE" if error > MAX_ERROR else "")
            measure(table, title, mixture, ids, launches(mixture, layers, x, ids, weights, kernels.experts))
            by_ours = launches(mixture, layers, x, ids, weights, OURS)
            measure(table, "  products by our kernel", mixture, ids, by_ours)
            try:
                measure(
                    table, "  grouped_mm, rows sorted before", mixture, ids, torch_launches(mixture, layers, x, ids)
                )
            except RuntimeError as error_of_torch:
                table.failed("  grouped_mm", rows, error_of_torch)
        del layers


def measure(table: Table, title: str, mixture: Mixture, ids: Tensor, some: list[Launch]) -> None:
    table.row(title, len(ids), timed(some), mixture.num_bytes(ids), mixture.flops(ids))


def launches(
    mixture: Mixture, layers: list[Layer], x: Tensor, ids: Tensor, weights: Tensor, compute: Callable[..., Tensor]
) -> list[Launch]:
    """Return launches of the kernels, from the grouping of the pairs to the sum over the experts of a token."""
    return [partial(compute, x, ids, weights, *layers[index % LAYERS], mixture.activation) for index in range(LAUNCHES)]


def relative_error(mixture: Mixture, layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> float:
    """Return the error of a replay of a CUDA graph, compared with the loop over the experts in float32."""
    gate_up, down = (
        ExpertLinear(linear.weight.float(), None if linear.bias is None else linear.bias.float()) for linear in layer
    )
    expected = experts_by_loop(x.float(), ids, weights, gate_up, down, mixture.activation)
    kernels.experts(x, ids, weights, *layer, mixture.activation)
    static, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = kernels.experts(static, ids, weights, *layer, mixture.activation)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    return float((found.float() - expected).norm() / expected.norm())


def torch_launches(mixture: Mixture, layers: list[Layer], x: Tensor, ids: Tensor) -> list[Launch]:
    """Return launches of torch's products and the activation alone: without sorting, biases, weights and sums."""
    order = ids.flatten().argsort()
    rows = x[order // ids.shape[1]]
    ends = ids.flatten().bincount(minlength=mixture.experts).cumsum(0).to(torch.int32)

    def products(layer: Layer) -> Tensor:
        gate_up, down = (linear.weight.transpose(1, 2) for linear in layer)
        inner = mixture.activation(functional.grouped_mm(rows, gate_up, offs=ends))
        return functional.grouped_mm(inner, down, offs=ends)

    return [partial(products, layers[index % LAYERS]) for index in range(LAUNCHES)]
