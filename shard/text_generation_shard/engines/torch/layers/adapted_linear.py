"""Linear layers that add, for each token, the product of its LoRA adapter (Hu et al. 2021, arXiv 2106.09685).

y = x·Wᵀ + b + scale · (x·Aᵀ)·Bᵀ. The matrices of all adapters are stacked, so that one pair of products serves all tokens of a
step. The base product may be one with quantized weights. In an embedding the columns of A at the tokens take the place of x·Aᵀ.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.operands import ACTIVATIONS, AdapterStack
from text_generation_shard.engines.torch.kernels.packed_weight import MatvecWeight
from text_generation_shard.engines.torch.layers.linear import ParallelLinear, Projection
from text_generation_shard.engines.torch.layers.quantized.choice import QuantizedLinear
from text_generation_shard.engines.torch.weights.parameter import ParameterShard

MIN_RANK = 16
"""Ranks are padded to a power of two from this on: the least that tensor cores multiply."""


class AdapterRows(Protocol):
    """The tokens of a step by adapter."""

    def begin(self, x: Tensor, stack: AdapterStack, *, beside: bool = True) -> Tensor:
        """Begin the product of `x` [tokens, inputs] with each token's adapter; return what `end` expects, before the next `begin`.

        `beside`: it may be computed beside what comes before `end`, in memory of its own with the dtype of `x`.
        """
        ...

    def look_up(self, ids: Tensor, stack: AdapterStack) -> Tensor:
        """Return what `end` expects for an embedding: the column of A of each of `ids`, int64 [tokens]."""
        ...

    def end(self, begun: Tensor, stack: AdapterStack, y: Tensor) -> None:
        """Add the product, scale · (x·Aᵀ)·Bᵀ, to `y` [tokens, outputs]; tokens without an adapter stay as they are."""

    def update(self, x: Tensor, stack: AdapterStack, base: Callable[[], Tensor], residual: Tensor) -> Tensor:
        """Return base() [tokens, outputs], which is to be added to `residual`; the product is added to one of both."""
        begun, y = self.begin(x, stack), base()
        self.end(begun, stack, y)
        return y

    def activate(self, x: Tensor, stack: AdapterStack, base: Callable[[], Tensor], kind: str, out: Tensor) -> None:
        """Write act(gate) · up of the sum of base() [tokens, 2 · inner] and the product to `out` [tokens, inner]."""
        begun, y = self.begin(x, stack), base()
        self.end(begun, stack, y)
        gate, up = y.chunk(2, dim=-1)
        out.copy_(ACTIVATIONS[kind](gate).mul_(up))


class StepAdapters:
    """The adapters of the step in progress, for all adapted layers of a model; `count` is the number of places for adapters."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: AdapterRows | None = None
        """None: no token has an adapter."""

    def begin(self, indices: Tensor | None, rows_of: Callable[[Tensor, int], AdapterRows]) -> AdapterRows | None:
        """Begin a step whose tokens have these adapters: [tokens], 0 for none; None if no token has one."""
        self.rows = None if indices is None else rows_of(indices, self.count)
        return self.rows


class AdapterStore(Protocol):
    """The adapters of a rank: held in host memory, and copied to numbered places on the device."""

    def change(self, command: str, name: str, argument: str | int) -> int | None:
        """Execute a command about an adapter.

        read (folder): start to read it, beside the steps; loaded: return 1 if it is, 0 if it cannot be, -1 while it is read; place
        (number): copy it to a place on the device, after the steps that were launched; drop: forget it, also while it is read.
        """
        ...

    def problem(self, name: str) -> BaseException | None:
        """Return the reason why an adapter cannot be loaded."""
        ...


class AdapterPlaces:
    """The places for adapters of projections with one input, on the device: `place` there what `packed` has prepared."""

    def __init__(
        self, projections: Sequence[Projection], rank: int, count: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.projections = tuple(projections)
        self.count, self.device = count, device
        self._rank = max(MIN_RANK, 1 << (rank - 1).bit_length())
        outputs, inputs = [part.outputs.length for part in projections], projections[0].inputs.length
        self._parts = torch.arange(len(projections)).repeat_interleave(torch.tensor(outputs))
        self._order = torch.arange(sum(outputs))
        down = torch.zeros(count, len(projections) * self._rank, inputs, device=device, dtype=dtype)
        up = torch.zeros(count, sum(outputs), self._rank, device=device, dtype=dtype)
        self._stack = AdapterStack(down, up, self._parts.tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return self._stack.down.nbytes + self._stack.up.nbytes

    def packed(self, changes: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the matrices of an adapter as the stack has them, in host memory, from A and scale · B by module.

        Those of a module without a change are zero.
        """
        pinned = self._stack.down.is_cuda
        down, up = (
            torch.zeros(each.shape[1:], dtype=each.dtype, pin_memory=pinned)
            for each in (self._stack.down, self._stack.up)
        )
        first = 0
        for part, each in enumerate(self.projections):
            if each.name in changes:
                (a, b), start = changes[each.name], each.outputs.start
                rank, columns = len(a), slice(each.inputs.start, each.inputs.start + each.inputs.length)
                down[part * self._rank : part * self._rank + rank] = a[:, columns].to(down)
                # The last ranks have rows of the LM head that do not exist.
                own = b[start : start + each.outputs.length]
                up[first : first + len(own), :rank] = own.to(up)
            first += each.outputs.length
        up.copy_(up[self._order])
        return down, up

    def place(self, place: int, down: Tensor, up: Tensor) -> None:
        """Copy the matrices of an adapter to a place on the device, after the steps that were launched."""
        self._stack.down[place].copy_(down, non_blocking=True)
        self._stack.up[place].copy_(up, non_blocking=True)

    def add_product(self, rows: AdapterRows, x: Tensor, y: Tensor) -> None:
        """Add the products of `x` [tokens, inputs] to `y` [tokens, outputs]."""
        rows.end(rows.begin(x, self._stack, beside=False), self._stack, y)

    def add_embedded(self, rows: AdapterRows, ids: Tensor, y: Tensor, scale: float) -> None:
        """Add the changes of the embeddings of `ids`, int64 [tokens], times `scale`, to `y` [tokens, outputs]."""
        rows.end(rows.look_up(ids, self._stack).mul_(scale), self._stack, y)


class AdaptedLinear(AdapterPlaces):
    """Implements `Linear`. Load `base`, then `place` adapters."""

    def __init__(
        self,
        base: ParallelLinear | QuantizedLinear,
        projections: Sequence[Projection],
        rank: int,
        step: StepAdapters,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(projections, rank, step.count, device, dtype)
        self.base, self._step = base, step

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    @property
    def weight(self) -> Tensor:
        """The weight of the base, which may be converted."""
        return self.base.weight

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        self.base.weight = weight

    @property
    def is_changed(self) -> bool:
        """True if a token of the step has an adapter."""
        return self._step.rows is not None

    @property
    def outputs(self) -> int:
        return len(self._order)

    @property
    def matvec_weight(self) -> MatvecWeight | None:
        """None in a step with adapters: their products need the normed values in memory."""
        return None if self.is_changed else self.base.matvec_weight

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows = self._step.rows
        if rows is None:
            return self.base(x, out)
        begun = rows.begin(x, self._stack)
        y = self.base(x, out)
        rows.end(begun, self._stack, y)
        return y

    def update(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the product of `x` [tokens, inputs], which is to be added to `residual`, where a part of it may be already.

        Only in a step with adapters.
        """
        assert self._step.rows is not None
        return self._step.rows.update(x, self._stack, partial(self.base, x), residual)

    def activate(self, x: Tensor, kind: str, out: Tensor) -> None:
        """Write act(gate) · up of the product of `x` to `out` [tokens, outputs / 2], in a step with adapters."""
        assert self._step.rows is not None
        self._step.rows.activate(x, self._stack, partial(self.base, x), kind, out)

    def named_parameters(self) -> dict[str, ParameterShard]:
        return self.base.named_parameters()

    def process_weights_after_loading(self, order: Tensor | None = None) -> None:
        """Prepare the loaded weights of the base: see `ParallelLinear`; before `packed`."""
        if order is not None:
            self._order = order.cpu()
            self._stack = AdapterStack(self._stack.down, self._stack.up, self._parts[self._order].tolist())
        self.base.process_weights_after_loading(order)

    def pack(self) -> None:
        self.base.pack()


class LoopedRows(AdapterRows):
    """Implements `AdapterRows` in plain torch, adapter by adapter. `indices` [tokens] are 0 for tokens without one."""

    def __init__(self, indices: Tensor, _count: int) -> None:
        found = sorted({*indices.tolist()})
        self._rows: list[tuple[int, Tensor | slice]] = [
            (index - 1, (indices == index).nonzero()[:, 0] if len(found) > 1 else slice(None))
            for index in found
            if index
        ]

    def begin(self, x: Tensor, stack: AdapterStack, *, beside: bool = True) -> Tensor:
        values = x.to(stack.down.dtype)
        shrunk = values.new_empty(len(x), stack.down.shape[1])
        for adapter, rows in self._rows:
            shrunk[rows] = values[rows] @ stack.down[adapter].t()
        return shrunk

    def look_up(self, ids: Tensor, stack: AdapterStack) -> Tensor:
        shrunk = stack.down.new_empty(len(ids), stack.rank)
        for adapter, rows in self._rows:
            shrunk[rows] = stack.down[adapter][:, ids[rows]].t()
        return shrunk

    def end(self, begun: Tensor, stack: AdapterStack, y: Tensor) -> None:
        rank = stack.rank
        for adapter, rows in self._rows:
            own, up = begun[rows], stack.up[adapter]
            products = [
                own[:, part * rank : (part + 1) * rank] @ up[first:end].t() for first, end, part in stack.segments
            ]
            change = torch.cat(products, dim=1).to(y.dtype)
            if isinstance(rows, slice):
                y.add_(change)
            else:
                y.index_add_(0, rows, change)
