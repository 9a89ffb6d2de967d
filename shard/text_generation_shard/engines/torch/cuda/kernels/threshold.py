"""Which key closes the set of largest keys of a given weight, for top-p, typical-p and top-k: a search, no sort.

A float32 has an image among the uint32 that keeps its order. The weight of all keys ≥ t falls as t rises, so the wanted t is
found digit by digit, 16 thresholds weighed in each pass over the row. Once its first digits are known few keys are left
that share them; these are copied aside, and the remaining passes read them alone. A program a row; all sums are in
an order that is always the same.
"""

# ruff: noqa: N803, SIM108 – constants of kernels are in capitals, as Triton has them; a kernel's branches are no expressions
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CAPACITY = 8192
"""Keys of a row that are copied aside. Of normally distributed keys at most 3 % share three digits."""
WHOLE_PASSES = 3
"""Digits found before keys are copied aside."""
DIGIT_BITS = 4
_BLOCK = 1024
_NUM_WARPS = 8
_MAX_REGISTERS = 128
"""Of a thread: two programs fit on a multiprocessor, so that one computes while the other waits for memory."""


def smallest_set_threshold(keys: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """The largest key of a row such that the weights of all keys not below it add up to at least `mass`; else the least key.

    `keys` float32 [rows, n], no NaN wanted (it gives some number); `weights` float32 [rows, n] ≥ 0; `mass` [rows, 1].
    Returns float32 [rows, 1]. Sums are float32.
    """
    return _search(keys, weights, mass)


def kth_largest(keys: Tensor, k: Tensor) -> Tensor:
    """The kth largest key of each row, float32 [rows, 1]; the least one where there are fewer. `k` [rows, 1]; n ≤ 2²⁴."""
    return _search(keys, None, k)


def _search(keys: Tensor, weights: Tensor | None, mass: Tensor) -> Tensor:
    rows, count = keys.shape
    thresholds = torch.empty(rows, 1, dtype=torch.float32, device=keys.device)
    aside = torch.empty(rows, 2, min(CAPACITY, count), dtype=torch.float32, device=keys.device)
    _search_kernel[(rows,)](
        keys,
        weights,
        mass.to(torch.float32).contiguous(),
        thresholds,
        aside,
        keys.stride(0),
        0 if weights is None else weights.stride(0),
        COUNT=count,
        DIGIT_BITS=DIGIT_BITS,
        WHOLE_PASSES=WHOLE_PASSES,
        CAPACITY=aside.shape[2],
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        maxnreg=_MAX_REGISTERS,
    )
    return thresholds


# Loads of four elements at once would be in another layout than the sums, at the price of an exchange between threads.
@triton.jit(do_not_specialize_on_alignment=("keys", "weights", "aside"))
def _search_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    keys: tl.tensor,
    weights: tl.tensor | None,
    mass: tl.tensor,
    thresholds: tl.tensor,
    aside: tl.tensor,
    keys_stride: int,
    weights_stride: int,
    COUNT: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    WHOLE_PASSES: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(mass + row)
    keys += row * keys_stride
    if weights is not None:
        weights += row * weights_stride
    aside += row * 2 * CAPACITY
    digits = tl.arange(0, 1 << DIGIT_BITS)
    # The wanted image shares the digits of `low` that are known; keys whose image has greater ones weigh `above`.
    low = tl.full([], 0, tl.uint32)
    above = tl.full([], 0.0, tl.float32)
    # How many keys lie aside, −1 before any do, and the weight of those above them all.
    held = tl.full([], -1, tl.int32)
    weight_above_held = tl.full([], 0.0, tl.float32)
    shift = tl.full([], 32, tl.uint32)
    for index in range(32 // DIGIT_BITS):
        if (index >= WHOLE_PASSES) & (held < 0):
            found = _copy_aside(keys, weights, COUNT, low, shift, aside, CAPACITY, BLOCK)
            tl.debug_barrier()  # what one thread wrote another will read
            if found <= CAPACITY:
                held = found
                weight_above_held = above
        shift -= DIGIT_BITS
        images = low + (digits.to(tl.uint32) << shift)
        if held < 0:
            sums = _weigh(keys, weights, COUNT, images, BLOCK)
        elif weights is None:
            sums = weight_above_held + _weigh(aside, None, held, images, BLOCK)
        else:
            sums = weight_above_held + _weigh(aside, aside + CAPACITY, held, images, BLOCK)
        # Sums fall with the digit: as many reach the mass as the digit says, the first by what is known already.
        digit = tl.sum(((sums >= wanted) & (digits > 0)).to(tl.int32))
        above = tl.maximum(above, tl.max(tl.where(digits > digit, sums, 0.0)))
        low += digit.to(tl.uint32) << shift
    # Nothing reached the mass if `low` is 0. Else it is a key, or would be if all sums were rounded alike.
    if (held < 0) | (low == 0):
        least = _least(keys, COUNT, low, BLOCK)
    else:
        least = _least(aside, held, low, BLOCK)
    tl.store(thresholds + row, _key(least))


@triton.jit
def _weigh(keys: tl.tensor, weights: tl.tensor | None, count: int, images: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """For each of `images` the weight of the keys whose image is not below it."""
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros([images.shape[0], BLOCK], tl.float32)
    start = 0
    present, amounts = _tile(keys, weights, count, columns)
    while start < count:
        start += BLOCK
        # The next tile is on its way while this one is weighed.
        present_next, amounts_next = _tile(keys, weights, count, start + columns)
        sums += tl.where(present[None, :] >= images[:, None], amounts[None, :], 0.0)
        present, amounts = present_next, amounts_next
    return tl.sum(sums, 1)


@triton.jit
def _tile(keys: tl.tensor, weights: tl.tensor | None, count: int, places: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Images and weights of the keys at `places`; beyond the last one the weights are 0."""
    inside = places < count
    if weights is None:
        amounts = inside.to(tl.float32)
    else:
        amounts = tl.load(weights + places, mask=inside, other=0.0)
    return _image(tl.load(keys + places, mask=inside, other=0.0)), amounts


@triton.jit
def _copy_aside(  # noqa: PLR0913 – a kernel's arguments are flat
    keys: tl.tensor,
    weights: tl.tensor | None,
    count: int,
    low: tl.tensor,
    bits: tl.tensor,
    aside: tl.tensor,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Copy the keys whose image is `low` up to the last `bits` bits, and their weights; returns how many there are, room or not."""
    columns = tl.arange(0, BLOCK)
    found = tl.full([], 0, tl.int32)
    start = 0
    while start < count:
        places = start + columns
        inside = places < count
        values = tl.load(keys + places, mask=inside, other=0.0)
        ours = inside & ((_image(values) - low) >> bits == 0)
        targets = found + tl.cumsum(ours.to(tl.int32), 0) - 1
        ours_held = ours & (targets < CAPACITY)
        tl.store(aside + targets, values, mask=ours_held)
        if weights is not None:
            amounts = tl.load(weights + places, mask=ours_held, other=0.0)
            tl.store(aside + CAPACITY + targets, amounts, mask=ours_held)
        found += tl.sum(ours.to(tl.int32))
        start += BLOCK
    return found


@triton.jit
def _least(keys: tl.tensor, count: int, low: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The least image among those not below `low`."""
    columns = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)
    start = 0
    while start < count:
        places = start + columns
        inside = places < count
        images = _image(tl.load(keys + places, mask=inside, other=0.0))
        least = tl.minimum(least, tl.where(inside & (images >= low), images, 0xFFFFFFFF).to(tl.uint32))
        start += BLOCK
    return tl.min(least)


@triton.jit
def _image(keys: tl.tensor) -> tl.tensor:
    """uint32 in the order of the float32 `keys`: the sign bit turned for positive numbers, every bit for negative ones."""
    bits = keys.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _key(image: tl.tensor) -> tl.tensor:
    """The float32 whose image it is."""
    bits = image.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -0x80000000)).to(tl.float32, bitcast=True)
