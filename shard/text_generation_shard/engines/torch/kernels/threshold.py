"""Finds the threshold of top-p, typical-p and top-k: the smallest of a row's largest keys, by a radix search without sorting.

Each float32 key is mapped to a uint32 with the same order. The total weight of all keys ≥ t decreases with t, so the threshold
is found digit by digit; each pass over the row weighs 16 candidates. After the first digits only a few keys share the known
digits; these are copied to a buffer, and the remaining passes read only the buffer. One program per row; all sums are in a
fixed order.
"""

# ruff: noqa: SIM108 – Triton needs branches instead of expressions
import torch
import triton
import triton.language as tl
from torch import Tensor

CAPACITY = 8192
"""Keys of a row that the buffer holds. Of normally distributed keys at most 3 % share three digits."""
WHOLE_PASSES = 3
"""Digits found before keys are copied to the buffer."""
DIGIT_BITS = 4
_BLOCK = 1024
_NUM_WARPS = 8
_MAX_REGISTERS = 128
"""Per thread: two programs fit on a multiprocessor, so that one computes while the other waits for memory."""


def kth_largest(keys: Tensor, k: Tensor) -> Tensor:
    """Return the kth largest key of each row, float32 [rows, 1], or its smallest if it has fewer. `k` [rows, 1]; n ≤ 2²⁴."""
    return smallest_set_threshold(keys, None, k)


def smallest_set_threshold(keys: Tensor, weights: Tensor | None, mass: Tensor) -> Tensor:
    """Return the largest key t of each row for which the weights of all keys ≥ t add up to `mass`; else the smallest key.

    `keys` float32 [rows, n] without NaN (the result would be undefined); `weights` float32 [rows, n] ≥ 0, None: 1 each; `mass`
    [rows, 1]. Returns float32 [rows, 1]. Sums are float32.
    """
    rows, count = keys.shape
    thresholds = torch.empty(rows, 1, dtype=torch.float32, device=keys.device)
    buffer = torch.empty(rows, 2, min(CAPACITY, count), dtype=torch.float32, device=keys.device)
    _search_kernel[(rows,)](
        keys,
        weights,
        mass.to(torch.float32).contiguous(),
        thresholds,
        buffer,
        keys.stride(0),
        0 if weights is None else weights.stride(0),
        COUNT=count,
        DIGIT_BITS=DIGIT_BITS,
        WHOLE_PASSES=WHOLE_PASSES,
        CAPACITY=buffer.shape[2],
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        maxnreg=_MAX_REGISTERS,
    )
    return thresholds


# Vectorized loads of four elements would have another layout than the sums, which would cost an exchange between threads.
@triton.jit(do_not_specialize_on_alignment=("keys", "weights", "buffer"))
def _search_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    keys: tl.tensor,
    weights: tl.tensor | None,
    mass: tl.tensor,
    thresholds: tl.tensor,
    buffer: tl.tensor,
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
    buffer += row * 2 * CAPACITY
    digits = tl.arange(0, 1 << DIGIT_BITS)
    # The threshold shares the known digits of `low`; keys with greater digits have the total weight `above`.
    low = tl.full([], 0, tl.uint32)
    above = tl.full([], 0.0, tl.float32)
    # Number of keys in the buffer, −1 before it is filled, and the total weight of the keys above those in it.
    buffered = tl.full([], -1, tl.int32)
    weight_above_buffered = tl.full([], 0.0, tl.float32)
    shift = tl.full([], 32, tl.uint32)
    for index in range(32 // DIGIT_BITS):
        if (index >= WHOLE_PASSES) & (buffered < 0):
            found = _copy_to_buffer(keys, weights, COUNT, low, shift, buffer, CAPACITY, BLOCK)
            tl.debug_barrier()  # other threads read what a thread wrote
            if found <= CAPACITY:
                buffered = found
                weight_above_buffered = above
        shift -= DIGIT_BITS
        images = low + (digits.to(tl.uint32) << shift)
        if buffered < 0:
            sums = _weigh(keys, weights, COUNT, images, BLOCK)
        elif weights is None:
            sums = weight_above_buffered + _weigh(buffer, None, buffered, images, BLOCK)
        else:
            sums = weight_above_buffered + _weigh(buffer, buffer + CAPACITY, buffered, images, BLOCK)
        # Sums decrease with the digit, so the number of sums that reach the mass gives the digit; digit 0 always does.
        digit = tl.sum(((sums >= wanted) & (digits > 0)).to(tl.int32))
        above = tl.maximum(above, tl.max(tl.where(digits > digit, sums, 0.0)))
        low += digit.to(tl.uint32) << shift
    # If `low` is 0, the mass was not reached. Otherwise `low` is a key, or would be one without rounding differences.
    if (buffered < 0) | (low == 0):
        least = _least(keys, COUNT, low, BLOCK)
    else:
        least = _least(buffer, buffered, low, BLOCK)
    tl.store(thresholds + row, _key(least))


@triton.jit
def _weigh(keys: tl.tensor, weights: tl.tensor | None, count: int, images: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return, for each of `images`, the total weight of the keys whose image is not below it."""
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros([images.shape[0], BLOCK], tl.float32)
    start = 0
    present, amounts = _tile(keys, weights, count, columns)
    while start < count:
        start += BLOCK
        # Load the next tile while this one is weighed.
        present_next, amounts_next = _tile(keys, weights, count, start + columns)
        sums += tl.where(present[None, :] >= images[:, None], amounts[None, :], 0.0)
        present, amounts = present_next, amounts_next
    return tl.sum(sums, 1)


@triton.jit
def _tile(keys: tl.tensor, weights: tl.tensor | None, count: int, indices: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Load images and weights of the keys at `indices`; weights are 0 beyond the last key."""
    inside = indices < count
    if weights is None:
        amounts = inside.to(tl.float32)
    else:
        amounts = tl.load(weights + indices, mask=inside, other=0.0)
    return _image(tl.load(keys + indices, mask=inside, other=0.0)), amounts


@triton.jit
def _copy_to_buffer(  # noqa: PLR0913 – a kernel's arguments are flat
    keys: tl.tensor,
    weights: tl.tensor | None,
    count: int,
    low: tl.tensor,
    bits: tl.tensor,
    buffer: tl.tensor,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Copy keys whose image equals `low` above its last `bits` bits, with their weights; return their number, even if > CAPACITY."""
    columns = tl.arange(0, BLOCK)
    found = tl.full([], 0, tl.int32)
    start = 0
    while start < count:
        indices = start + columns
        inside = indices < count
        values = tl.load(keys + indices, mask=inside, other=0.0)
        matching = inside & ((_image(values) - low) >> bits == 0)
        targets = found + tl.cumsum(matching.to(tl.int32), 0) - 1
        fits = matching & (targets < CAPACITY)
        tl.store(buffer + targets, values, mask=fits)
        if weights is not None:
            amounts = tl.load(weights + indices, mask=fits, other=0.0)
            tl.store(buffer + CAPACITY + targets, amounts, mask=fits)
        found += tl.sum(matching.to(tl.int32))
        start += BLOCK
    return found


@triton.jit
def _least(keys: tl.tensor, count: int, low: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the smallest image that is not below `low`."""
    columns = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)
    start = 0
    while start < count:
        indices = start + columns
        inside = indices < count
        images = _image(tl.load(keys + indices, mask=inside, other=0.0))
        least = tl.minimum(least, tl.where(inside & (images >= low), images, 0xFFFFFFFF).to(tl.uint32))
        start += BLOCK
    return tl.min(least)


@triton.jit
def _image(keys: tl.tensor) -> tl.tensor:
    """Map float32 `keys` to uint32 in the same order: flip the sign bit of positive numbers, all bits of negative ones."""
    bits = keys.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _key(image: tl.tensor) -> tl.tensor:
    """Return the float32 key of an image."""
    bits = image.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -0x80000000)).to(tl.float32, bitcast=True)
