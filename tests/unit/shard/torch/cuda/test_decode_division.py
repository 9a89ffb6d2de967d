"""Division of the blocks of rows over the programs of decode attention."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.kernels.decode_attention import NO_WINDOW
from text_generation_shard.engines.torch.kernels.decode_launch import blocks_of, divide, parts_of

PLACES = 32


@triton.jit
def _division_kernel(
    positions: tl.tensor,
    window: int,
    num_rows: int,
    programs: int,
    shares: tl.tensor,
    table: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    ends, share = divide(positions, window, num_rows, programs, ROWS, BLOCK)
    tl.store(shares, share)
    for row in range(num_rows):
        start, stop = blocks_of(ends, row, ROWS)
        first, parts = parts_of(start, stop, share)
        line = table + row * 4
        tl.store(line, start)
        tl.store(line + 1, stop)
        tl.store(line + 2, first)
        tl.store(line + 3, parts)


def division(
    lengths: list[int], programs: int, device: torch.device, window: int = NO_WINDOW
) -> tuple[int, list[list[int]]]:
    """Return the share of a program, and for each row its start and end in the list of blocks, its first program and its parts."""
    positions = torch.tensor(lengths, dtype=torch.int32, device=device) - 1
    share = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.zeros(len(lengths), 4, dtype=torch.int32, device=device)
    places = 1 if len(lengths) == 1 else PLACES
    _division_kernel[(1,)](positions, window, len(lengths), programs, share, table, ROWS=places, BLOCK=BLOCK_SIZE)
    return share.item(), table.tolist()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("blocks", "programs", "share", "parts"),
    [
        ([8] * 7, 4, 16, [1] * 7),
        ([8] * 7, 7, 8, [1] * 7),
        ([8, 7, 6, 8, 8, 7, 8], 7, 8, [1] * 7),
        ([9] * 7, 15, 5, [2] * 7),
        ([8] * 7, 5, 12, [1, 2, 1, 1, 2, 1, 1]),  # two rows are too many for a program, and one too few
        ([9, 8, 8, 2, 2, 3, 1], 4, 9, [1, 1, 2, 1, 1, 1, 1]),
        ([8, 5, 5, 5, 5], 5, 6, [2, 2, 1, 1, 2]),  # with whole rows the longest one would take too long
        ([20], 8, 3, [7]),
        ([1], 8, 2, [1]),
    ],
)
def test_a_larger_share_leaves_rows_whole_or_cuts_them_alike(
    blocks: list[int], programs: int, share: int, parts: list[int], device: torch.device
) -> None:
    found, rows = division([BLOCK_SIZE * count for count in blocks], programs, device)
    assert (found, [row[3] for row in rows]) == (share, parts)


def test_each_visible_block_is_read_once(device: torch.device) -> None:
    draw = random.Random(1)
    for _ in range(60):
        longest = draw.choice((20, 200, 3000))
        least = draw.choice((1, longest - longest // 10))
        lengths = [draw.randint(least, longest) for _ in range(draw.randint(1, PLACES))]
        programs, window = draw.randint(1, 80), draw.choice((NO_WINDOW, draw.randint(1, 200)))
        share, rows = division(lengths, programs, device, window)
        lines = []
        for number, (length, (start, stop, first, parts)) in enumerate(zip(lengths, rows, strict=True)):
            visible = (length - 1) // BLOCK_SIZE + 1 - max(0, length - window) // BLOCK_SIZE
            assert start == (rows[number - 1][1] if number else 0)
            assert start + visible <= stop
            readers = range(start // share, (start + visible - 1) // share + 1)
            assert (first, parts) == (readers.start, len(readers))
            assert (stop - 1) // share == readers[-1] < programs
            lines += [program + number for program in readers]
        assert len(set(lines)) == len(lines)
        assert share * programs >= rows[-1][1]
