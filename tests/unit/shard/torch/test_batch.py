"""The flat batch of a step."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from text_generation_proto.values import Sampling, Stopping
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE, CacheShape, LayerShape, PagedKVCache
from text_generation_shard.engines.torch.batch.step_plan import Padding, plan_chunks, plan_decoding, table_updates
from text_generation_shard.engines.torch.batch.tiles import (
    GROUP_COST,
    MAX_GROUP_KEYS,
    MAX_GROUP_PAIRS,
    TILE_TOKENS,
    StepBatch,
    build_batch,
)
from text_generation_shard.step.sequence import Sequence, StepRow, StepRows

CPU = torch.device("cpu")


def a_row(slot: int, start: int, length: int, first_block: int) -> StepRow:
    blocks = list(range(first_block, first_block - (-(start + length) // BLOCK_SIZE)))
    # Each token id encodes its slot and position.
    tokens = [slot * 10_000 + position for position in range(start + length)]
    sequence = Sequence(
        slot, tokens, len(tokens) if length > 1 else start, blocks, start, 0, 0, Sampling(), Stopping(1), 0, None
    )
    return StepRow(sequence, start, length, samples=True)


def make_batch(sizes: list[tuple[int, int]], window: int | None = None) -> tuple[list[StepRow], StepBatch]:
    """Return rows of (first position, length) and their batch; rows of one token decode, and come first."""
    rows: list[StepRow] = []
    sizes = sorted(sizes, key=lambda size: size[1] > 1)
    first_block = 0
    for slot, (start, length) in enumerate(sizes):
        rows.append(a_row(slot, start, length, first_block))
        first_block += len(rows[-1].sequence.blocks)
    cache = PagedKVCache(CacheShape((LayerShape(1, 1, 2),), CPU, torch.float32), [first_block])
    step, max_blocks = StepRows(None, rows), 8192 // BLOCK_SIZE
    updates = table_updates(step, 65, max_blocks)
    if step.prefills:
        plan = plan_chunks(step, updates, greedy=False)
    else:
        plan = plan_decoding(step, updates, Padding(len(rows), len(updates), 64, (0, 0)), greedy=False)
    tables = torch.zeros(1, 65, max_blocks, dtype=torch.int32)
    cells, new = (torch.from_numpy(plan.column(name)).long() for name in ("cells", "blocks"))
    tables.view(-1)[cells] = new.int()
    last_tokens = torch.tensor([row.sequence.tokens[-1] for row in rows], dtype=torch.int32)
    return rows, build_batch(plan, tables, last_tokens, cache, window)


sizes = st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([1, 1, 1, 5, 128, 129, 700])), min_size=1, max_size=40)


@given(sizes=sizes, window=st.sampled_from([None, 50]))
def test_every_token_of_every_row_occurs_once(sizes: list[tuple[int, int]], window: int | None) -> None:
    rows, batch = make_batch(sizes, window)
    assert sorted(batch.token_ids.tolist()) == sorted(
        row.sequence.slot * 10_000 + position for row in rows for position in range(row.start, row.start + row.length)
    )
    assert (batch.token_ids % 10_000).tolist() == batch.positions.tolist()
    flat = batch.in_plan_order(batch.token_ids)
    assert flat.tolist() == [token for row in rows for token in row.sequence.tokens[row.start :]]


@given(sizes=sizes)
def test_groups_are_contiguous_and_bounded(sizes: list[tuple[int, int]]) -> None:
    _, batch = make_batch(sizes)
    first = 0
    for group in batch.groups:
        assert group.first == first
        first += group.tokens
        keys = max(tile.end for tile in group.tiles)
        assert group.queries == max(tile.length for tile in group.tiles) <= TILE_TOKENS
        if len(group.tiles) > 1:
            padded = len(group.tiles) * group.queries * keys
            assert padded <= MAX_GROUP_PAIRS
            assert len(group.tiles) * keys <= MAX_GROUP_KEYS
            assert padded - sum(tile.length * tile.end for tile in group.tiles) <= GROUP_COST
    assert first == batch.token_ids.numel()


def test_decode_rows_are_grouped_by_length() -> None:
    _, batch = make_batch([(30 + i, 1) for i in range(30)])
    assert len(batch.groups) == 1
    _, batch = make_batch([(2900, 1), (30, 1), (35, 1), (2930, 1)])
    assert [len(group.tiles) for group in batch.groups] == [2, 2]


def test_write_indices_follow_the_block_table() -> None:
    rows, batch = make_batch([(40, 1), (0, 20)])
    blocks = [rows[0].sequence.blocks[2], *([3] * 16), *([4] * 4)]
    offsets = [40 % BLOCK_SIZE, *range(16), *range(4)]
    expected = torch.tensor(
        [
            (block * 2 + pair) * BLOCK_SIZE + offset
            for block, offset in zip(blocks, offsets, strict=True)
            for pair in (0, 1)
        ]
    )
    assert torch.equal(batch.in_plan_order(batch.write_index[0, 2].view(-1, 2)).flatten(), expected)


def test_only_blocks_started_and_not_filled_are_cleared() -> None:
    # Continues a block started before; starts block 3; fills its block; starts block 1.
    _, batch = make_batch([(17, 1), (48, 1), (0, 16), (0, 20)])
    assert batch.entered_blocks[0].tolist() == [5, 8]
