"""The products of LoRA adapters for the tokens of a step, each with its own adapter: shrink, x·Aᵀ, and expand, + scale · s·Bᵀ.

Tokens are grouped by adapter once per step, without waiting for the host. A program multiplies blocks of tokens of one adapter.
Shrinking divides the inputs among programs, and expanding adds their sums in order. In steps of few tokens both run beside the
product of the base, in a second stream, which a graph captures too; their sum is added to it at the end. That of an output that is
added to the residual stream is added there, beside the product, and that of gate and up by the kernel of the activation. From some
tokens on it is that kernel that expands, which reads the product of the base anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.activation import activate, activated
from text_generation_shard.engines.torch.kernels.expert_groups import group_by_expert
from text_generation_shard.engines.torch.kernels.operands import AdapterStack, GatedActivation
from text_generation_shard.engines.torch.kernels.pdl import after_previous, launch_dependents, pdl, supports_pdl

FEW_TOKENS = 256
"""Up to this many tokens in a step, blocks have few of them, and the inputs are divided among more programs."""
BLOCK_ROWS, FEW_BLOCK_ROWS = 32, 16
"""Tokens of a block."""
PROGRAMS, FEW_PROGRAMS = 16, 4
"""Most programs that take the blocks of an adapter in turns. Those without a block end at once."""
ROWS_OF_A_PROGRAM = 64
"""Tokens of a step for each of few programs."""
SPLITS, FEW_SPLITS = 4, 8
"""Most programs that divide the inputs of a block."""
MIN_SPLIT, FEW_MIN_SPLIT = 2048, 1024
"""Inputs of a program, at least."""
MAX_RANK_TILE = 64
INPUTS, FEW_INPUTS = 128, 256
"""Inputs of an iteration."""
TILES = 4
"""Tiles of outputs that a program expands to, one after the other, in steps of many tokens. Of few it is one, or two if there are many."""
ACTIVATED_TOKENS = 64
"""Above, the kernel of the activation expands: on an H200 8.51 instead of 8.63 ms a step of 128 tokens, 5.93 instead of 5.79 of 32."""
MANY_TILES = 128


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    # Of higher priority than the steps, so that it is done before the base product, which takes longer.
    return torch.cuda.Stream(device, priority=-2)  # type: ignore[no-untyped-call]


class GroupedRows:
    """Implements `AdapterRows`. `indices` int32 [tokens], contiguous, are 0 for tokens without an adapter, at most `count`."""

    def __init__(self, indices: Tensor, count: int) -> None:
        self._few = len(indices) <= FEW_TOKENS
        self._is_beside = self._few and indices.is_cuda
        """True if products run in the second stream, beside that of the base."""
        self._block_rows = FEW_BLOCK_ROWS if self._few else BLOCK_ROWS
        few = min(triton.cdiv(len(indices), ROWS_OF_A_PROGRAM), FEW_PROGRAMS)
        self._programs = count, few if self._few else PROGRAMS
        self._indices, self._groups = indices, group_by_expert(indices.unsqueeze(1), count + 1)
        self._shrunk: Tensor | None = None
        """Kept until the second stream has read it."""

    def begin(self, x: Tensor, stack: AdapterStack, *, beside: bool = True) -> Tensor:
        # All memory is of the stream of the base product, which waits for the second one before it frees any.
        shrunk = self._empty_shrunk(x, stack)
        if not (beside and self._is_beside):
            self._shrink(x, stack, shrunk)
            return shrunk
        change = x.new_empty(len(x), stack.up.shape[1])
        self._multiply_beside(x, stack, shrunk, change, adds=False)
        return change

    def look_up(self, ids: Tensor, stack: AdapterStack) -> Tensor:
        order = self._groups.order
        places = self._indices.index_select(0, order).sub_(1).clamp_(min=0)  # no row without an adapter is read
        return stack.down[places.long(), :, ids.index_select(0, order)].float().unsqueeze(0)

    def end(self, begun: Tensor, stack: AdapterStack, y: Tensor) -> None:
        if self._shrunk is None:
            self._expand(begun, stack, y)
        else:
            self._join()
            y += begun

    def update(self, x: Tensor, stack: AdapterStack, base: Callable[[], Tensor], residual: Tensor) -> Tensor:
        if self._is_beside:
            self._multiply_beside(x, stack, self._empty_shrunk(x, stack), residual)
            y = base()
            self._join()
        else:
            begun, y = self.begin(x, stack), base()
            self.end(begun, stack, y)
        return y

    def activate(self, x: Tensor, stack: AdapterStack, base: Callable[[], Tensor], kind: str, out: Tensor) -> None:
        if self._is_beside and len(x) <= ACTIVATED_TOKENS:
            begun, y = self.begin(x, stack), base()
            self._join()
            activate(y, GatedActivation(kind), out, begun)
            return
        shrunk = self._empty_shrunk(x, stack)
        if self._is_beside:
            self._multiply_beside(x, stack, shrunk, None)
            y = base()
            self._join()
        else:
            self._shrink(x, stack, shrunk)
            y = base()
        count, programs = self._programs
        _expand_activate_kernel[((count + 1) * programs, triton.cdiv(out.shape[1], stack.TILE))](
            shrunk,
            stack.up,
            y,
            out,
            self._groups.order,
            self._groups.offsets,
            count + 1,
            shrunk.shape[1],
            y.stride(0),
            out.stride(0),
            SPLITS=shrunk.shape[0],
            WIDTH=shrunk.shape[2],
            INNER=out.shape[1],
            RANK=stack.rank,
            KIND=kind,
            PROGRAMS=programs,
            BLOCK_ROWS=FEW_BLOCK_ROWS,
            RANK_TILE=min(stack.rank, MAX_RANK_TILE),
            TILE=stack.TILE,
            num_warps=4,
            **pdl(y),
        )

    def _multiply_beside(
        self, x: Tensor, stack: AdapterStack, shrunk: Tensor, y: Tensor | None, *, adds: bool = True
    ) -> None:
        """Shrink in the second stream; then add the product to `y`, if given, or write it. `_join` before either is used."""
        second = _second_stream(x.device)
        second.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(second):
            self._shrink(x, stack, shrunk)
            if y is not None:
                self._expand(shrunk, stack, y, adds=adds)
        self._shrunk = shrunk

    def _join(self) -> None:
        """Wait for the second stream."""
        device = self._indices.device
        torch.cuda.current_stream(device).wait_stream(_second_stream(device))
        self._shrunk = None

    def _empty_shrunk(self, x: Tensor, stack: AdapterStack) -> Tensor:
        """Return memory for the sums of each division of the inputs: float32 [splits, tokens, parts · rank], as the groups order them."""
        _, width, inputs = stack.down.shape
        most, least = (FEW_SPLITS, FEW_MIN_SPLIT) if self._few else (SPLITS, MIN_SPLIT)
        splits = min(most, triton.cdiv(inputs, least))
        return torch.empty(splits, len(x), width, dtype=torch.float32, device=x.device)

    def _shrink(self, x: Tensor, stack: AdapterStack, shrunk: Tensor) -> None:
        groups, (_, width, inputs) = self._groups, stack.down.shape
        # Many tokens are read once for all projections; few ones are divided among more programs.
        ranks = stack.rank if self._few else triton.next_power_of_2(width)
        tile, step = min(ranks, MAX_RANK_TILE), FEW_INPUTS if self._few else INPUTS
        _shrink_kernel[(math.prod(self._programs), triton.cdiv(width, tile), len(shrunk))](
            x,
            stack.down,
            shrunk,
            groups.order,
            groups.offsets,
            self._programs[0],
            len(x),
            x.stride(0),
            WIDTH=width,
            INPUTS=inputs,
            SHARE=triton.cdiv(triton.cdiv(inputs, len(shrunk)), step) * step,
            PROGRAMS=self._programs[1],
            BLOCK_ROWS=self._block_rows,
            RANK_TILE=tile,
            STEP=step,
            USE_PDL=supports_pdl(x),  # lets the next kernel start early, but does not: it waits for nothing
            num_warps=4,
        )

    def _expand(self, shrunk: Tensor, stack: AdapterStack, y: Tensor, *, adds: bool = True) -> None:
        groups, rank, (count, programs) = self._groups, stack.rank, self._programs
        numbers = count if adds else count + 1
        each = 1 + (len(stack.tiles) >= MANY_TILES) if self._few else TILES
        _expand_kernel[(numbers * programs, triton.cdiv(len(stack.tiles), each))](
            shrunk,
            stack.up,
            y,
            stack.tiles,
            groups.order,
            groups.offsets,
            numbers,
            shrunk.shape[1],
            y.stride(0),
            len(stack.tiles),
            SPLITS=shrunk.shape[0],
            WIDTH=shrunk.shape[2],
            OUTPUTS=stack.up.shape[1],
            RANK=rank,
            PROGRAMS=programs,
            BLOCK_ROWS=self._block_rows,
            RANK_TILE=min(rank, MAX_RANK_TILE),
            TILE=stack.TILE,
            EACH=each,
            ADDS=adds,
            num_warps=4,
            **pdl(y),
        )


@triton.jit(do_not_specialize=["tokens"])  # a prompt of another length needs no new kernel
def _shrink_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    down: tl.tensor,
    shrunk: tl.tensor,
    order: tl.tensor,
    offsets: tl.tensor,
    adapters: int,
    tokens: int,
    x_stride: int,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    RANK_TILE: tl.constexpr,
    STEP: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    launch_dependents(USE_PDL)
    number = 1 + tl.program_id(0) % adapters
    end = tl.load(offsets + number + 1)
    ranks = tl.program_id(1) * RANK_TILE + tl.arange(0, RANK_TILE)
    weights = down + (number - 1).to(tl.int64) * (WIDTH * INPUTS) + ranks * INPUTS
    split = tl.program_id(2)
    first = tl.load(offsets + number) + tl.program_id(0) // adapters * BLOCK_ROWS
    for start in range(first, end, PROGRAMS * BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        inside = rows < end
        sources = tl.load(order + rows, mask=inside, other=0).to(tl.int64) * x_stride
        total = tl.zeros((BLOCK_ROWS, RANK_TILE), tl.float32)
        for at in range(0, SHARE, STEP):
            columns = split * SHARE + at + tl.arange(0, STEP)
            exists = columns < INPUTS
            is_weight = exists[:, None] & (ranks < WIDTH)[None, :]
            values = tl.load(x + sources[:, None] + columns[None, :], mask=inside[:, None] & exists[None, :], other=0.0)
            a = tl.load(weights[None, :] + columns[:, None], mask=is_weight, other=0.0)
            total += tl.dot(values.to(a.dtype), a, input_precision="ieee")
        targets = (split * tokens + rows)[:, None] * WIDTH + ranks[None, :]
        tl.store(shrunk + targets, total, mask=inside[:, None] & (ranks < WIDTH)[None, :])


@triton.jit(do_not_specialize=["tokens"])  # a prompt of another length needs no new kernel
def _expand_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    shrunk: tl.tensor,
    up: tl.tensor,
    y: tl.tensor,
    tiles: tl.tensor,
    order: tl.tensor,
    offsets: tl.tensor,
    numbers: int,
    tokens: int,
    y_stride: int,
    tile_count: int,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    RANK_TILE: tl.constexpr,
    TILE: tl.constexpr,
    EACH: tl.constexpr,
    ADDS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    after_previous(USE_PDL)
    # If nothing is added to, the tokens without an adapter get zeros.
    number = tl.program_id(0) % numbers + (1 if ADDS else 0)
    has_adapter = number > 0
    end = tl.load(offsets + number + 1)
    weights = up + tl.maximum(number - 1, 0).to(tl.int64) * (OUTPUTS * RANK)
    first = tl.load(offsets + number) + tl.program_id(0) // numbers * BLOCK_ROWS
    first_tile = tl.program_id(1) * EACH
    last_tile = tl.minimum(first_tile + EACH, tile_count) - 1
    for start in range(first, end, PROGRAMS * BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        inside = rows < end
        is_real = inside[:, None] & has_adapter
        y_rows = y + tl.load(order + rows, mask=inside, other=0).to(tl.int64)[:, None] * y_stride
        # Tiles, and what is added to, are loaded one iteration ahead.
        outputs, stop, part = _tile(tiles, first_tile, TILE)
        base = tl.load(y_rows + outputs[None, :], mask=inside[:, None] & (outputs < stop)[None, :] & ADDS, other=0.0)
        for tile in range(first_tile, last_tile + 1):
            next_outputs, next_stop, next_part = _tile(tiles, tl.minimum(tile + 1, last_tile), TILE)
            mask = inside[:, None] & (next_outputs < next_stop)[None, :] & (tile < last_tile) & ADDS
            next_base = tl.load(y_rows + next_outputs[None, :], mask=mask, other=0.0)
            exists = (outputs < stop)[None, :]
            total = tl.zeros((BLOCK_ROWS, TILE), tl.float32)
            for at in range(0, RANK, RANK_TILE):
                ranks = at + tl.arange(0, RANK_TILE)
                places = shrunk + rows[:, None] * WIDTH + (part * RANK + ranks)[None, :]
                values = _sum_of_splits(places, is_real, tokens * WIDTH, SPLITS)
                b = tl.load(weights + outputs[None, :] * RANK + ranks[:, None], mask=exists, other=0.0)
                total += tl.dot(values.to(b.dtype), b, input_precision="ieee")
            total += base.to(tl.float32)
            tl.store(y_rows + outputs[None, :], total.to(y.dtype.element_ty), mask=inside[:, None] & exists)
            outputs, stop, part, base = next_outputs, next_stop, next_part, next_base


@triton.jit(do_not_specialize=["tokens"])  # a prompt of another length needs no new kernel
def _expand_activate_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    shrunk: tl.tensor,
    up: tl.tensor,
    y: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    offsets: tl.tensor,
    numbers: int,
    tokens: int,
    y_stride: int,
    out_stride: int,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    RANK: tl.constexpr,
    KIND: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    RANK_TILE: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    after_previous(USE_PDL)
    number = tl.program_id(0) % numbers  # 0: the tokens without an adapter
    end = tl.load(offsets + number + 1)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = (columns < INNER)[None, :]
    weights = up + tl.maximum(number - 1, 0).to(tl.int64) * (2 * INNER * RANK) + columns[None, :] * RANK
    first = tl.load(offsets + number) + tl.program_id(0) // numbers * BLOCK_ROWS
    for start in range(first, end, PROGRAMS * BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        inside = rows < end
        is_real = inside[:, None] & (number > 0)
        mask = inside[:, None] & exists
        sources = tl.load(order + rows, mask=inside, other=0).to(tl.int64)[:, None]
        at = y + sources * y_stride + columns[None, :]
        gate_base = tl.load(at, mask=mask, other=0.0)
        up_base = tl.load(at + INNER, mask=mask, other=0.0)
        gates = tl.zeros((BLOCK_ROWS, TILE), tl.float32)
        ups = tl.zeros((BLOCK_ROWS, TILE), tl.float32)
        for rank in range(0, RANK, RANK_TILE):
            ranks = rank + tl.arange(0, RANK_TILE)
            places = shrunk + rows[:, None] * WIDTH + ranks[None, :]
            last_part = places + (WIDTH - RANK)  # gate and up of a projection that has both are of one part
            gate_values = _sum_of_splits(places, is_real, tokens * WIDTH, SPLITS)
            up_values = _sum_of_splits(last_part, is_real, tokens * WIDTH, SPLITS)
            gate_b = tl.load(weights + ranks[:, None], mask=exists, other=0.0)
            up_b = tl.load(weights + INNER * RANK + ranks[:, None], mask=exists, other=0.0)
            gates += tl.dot(gate_values.to(gate_b.dtype), gate_b, input_precision="ieee")
            ups += tl.dot(up_values.to(up_b.dtype), up_b, input_precision="ieee")
        gates += gate_base.to(tl.float32)
        ups += up_base.to(tl.float32)
        values = activated(gates, KIND) * ups
        tl.store(out + sources * out_stride + columns[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_of_splits(places: tl.tensor, mask: tl.tensor, distance: tl.tensor, SPLITS: tl.constexpr) -> tl.tensor:
    """Return the sums of the shrunk values of all divisions of the inputs, `distance` numbers apart, in order."""
    values = tl.load(places, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        values += tl.load(places + split * distance, mask=mask, other=0.0)
    return values


@triton.jit
def _tile(tiles: tl.tensor, index: tl.tensor, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the outputs of a tile, the end of those that exist, and their projection."""
    tile = tiles + index * 3
    return tl.load(tile) + tl.arange(0, TILE), tl.load(tile + 1), tl.load(tile + 2)
