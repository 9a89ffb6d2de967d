"""Timing for the kernel benchmarks: launches in a CUDA graph, measured by events; and the products of models to measure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
LAUNCHES = 32
REPLAYS = 9
BYTES_BEYOND_L2 = 512 << 20
COPIED_BYTES = 2 << 30

Launch = Callable[[], object]


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def empty(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.empty(*shape, device=DEVICE, dtype=dtype)


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, device=DEVICE, dtype=torch.int32)


def copies(num_bytes: int) -> int:
    """Return how many copies of a tensor together exceed the L2 cache, plus one, up to LAUNCHES."""
    return min(max(BYTES_BEYOND_L2 // num_bytes, 1) + 1, LAUNCHES)


def one_each(tensors: Tensor, call: Callable[[Tensor], object], count: int = LAUNCHES) -> list[Launch]:
    """Return `count` launches that cycle through the tensors."""
    return [partial(call, tensors[index % len(tensors)]) for index in range(count)]


def timed(launches: Sequence[Launch]) -> float:
    """Return the median µs per launch, with the launches one after the other in a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for launch in launches:  # compiles, and fills workspaces
            launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / len(launches)


class Table:
    """Prints result rows, with the share of the bandwidth of a copy."""

    def __init__(self) -> None:
        source = empty(COPIED_BYTES // 4, dtype=torch.float32)
        target = torch.empty_like(source)
        self._bytes_per_us = 2 * COPIED_BYTES / timed([lambda: target.copy_(source)] * 4)
        print(f"a copy: {self._bytes_per_us / 1e6:.2f} TB/s, read and written")
        print(f"{'operation':44} {'rows':>6} {'µs':>9} {'GB/s':>7} {'of copy':>7} {'TFLOP/s':>8}")

    def row(self, name: str, rows: int, us: float, num_bytes: float, flops: float = 0) -> None:
        line = f"{name:44} {rows:6} {us:9.2f} {num_bytes / us / 1e3:7.0f} {num_bytes / us / self._bytes_per_us:7.0%}"
        print(line + f" {flops / us / 1e6:8.1f}" * bool(flops))

    def failed(self, name: str, rows: int, error: Exception) -> None:
        print(f"{name:44} {rows:6} {type(error).__name__}: {str(error).splitlines()[0][:90]}")


@dataclass(frozen=True)
class Product:
    """A product of a layer; `outputs` is the number of weight rows."""

    name: str
    kind: str
    outputs: int
    inputs: int

    @property
    def gated(self) -> bool:
        return self.kind == "gated"

    @property
    def num_bytes(self) -> int:
        return 2 * self.outputs * self.inputs

    def part(self, num_shard: int) -> Product:
        """Return the part of one of `num_shard` ranks: a range of inputs if an all-reduce follows, else of outputs."""
        if self.kind == "add":
            return replace(self, inputs=self.inputs // num_shard)
        return replace(self, outputs=self.outputs // num_shard)

    def weights(self) -> Tensor:
        return randn(copies(self.num_bytes), self.outputs, self.inputs)

    def reference(self, rows: int) -> list[Launch]:
        """Return launches of cuBLAS' plain product, without the operations fused into the kernel."""
        x, out = randn(rows, self.inputs), empty(rows, self.outputs)
        return one_each(self.weights(), lambda weight: torch.mm(x, weight.T, out=out))

    @property
    def title(self) -> str:
        return f"{self.name} [{self.outputs} × {self.inputs}]"


LLAMA_8B = (
    Product("norm, qkv", "norm", 6144, 4096),
    Product("output, add", "add", 4096, 4096),
    Product("norm, gate & up, silu", "gated", 28672, 4096),
    Product("down, add", "add", 4096, 14336),
)
HEAD = Product("head", "plain", 49152, 4096)
PRODUCTS = (
    *LLAMA_8B,
    HEAD,
    Product("SmolLM2 norm, qkv", "norm", 960, 576),
    Product("SmolLM2 output, add", "add", 576, 576),
    Product("SmolLM2 norm, gate & up, silu", "gated", 3072, 576),
    Product("SmolLM2 down, add", "add", 576, 1536),
    Product("SmolLM2 head", "plain", 49152, 576),
)
