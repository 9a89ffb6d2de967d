"""The flat batch of one step: the tokens of all rows in one dimension, grouped for attention.

The tokens of a row are cut into *tiles* of at most TILE_TOKENS, so that a long chunk attends tile by tile and each tile reads
only the keys before its end. Tiles of similar size form a *tile group*, which attends as one padded batch. The flat order is
the order of the groups; a decode row is a tile of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE, BlockTables, PagedKVCache, WriteIndex
from text_generation_shard.step.sequence import StepRow

TILE_TOKENS = 128
GROUP_COST = 2048
"""Cost of one more group, in padded (query, key) pairs; measured on CPU."""
MAX_GROUP_PAIRS = 1 << 18
"""Largest number of (query, key) pairs of a group: bounds the memory of its scores."""
MAX_GROUP_KEYS = 1 << 13
"""Largest number of keys of a group: bounds the size of its gathered keys and values, so that they fit the CPU cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Positions [start, start + length) of a row; `row` is its index in the step."""

    row: int
    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles that attend together, padded to the longest: tokens [first, first + tokens) of the flat order."""

    tiles: list[Tile]
    first: int
    tokens: int
    queries: int
    """Tokens of the longest tile."""

    @property
    def is_padded(self) -> bool:
        return self.tokens < len(self.tiles) * self.queries


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Inputs of a step on the device; n tokens in total."""

    token_ids: Tensor
    """[n]"""
    positions: Tensor
    """[n]"""
    write_index: WriteIndex
    """Cache positions of the tokens' keys and values: see `PagedKVCache.write`."""
    entered_blocks: Tensor
    """Blocks that a row starts but does not fill in this step: to be cleared first."""
    groups: list[TileGroup]
    offsets: list[list[tuple[int, Tile]]]
    """For each row, its tiles in order of position, each with its offset in the flat order."""

    def last_token_index(self, row: int) -> int:
        """Return the index of a row's last token in the flat order."""
        offset, tile = self.offsets[row][-1]
        return offset + tile.length - 1


def build_batch(
    rows: list[StepRow], tables: BlockTables, cache: PagedKVCache, window: int | None, device: torch.device
) -> StepBatch:
    """Build the batch of `rows`. `window` is the longest sliding window if every layer has one, else None."""
    groups = _groups(_tiles(rows), window)
    token_ids: list[int] = []
    offsets: list[list[tuple[int, Tile]]] = [[] for _ in rows]
    for group in groups:
        for tile in group.tiles:
            offsets[tile.row].append((len(token_ids), tile))
            token_ids.extend(rows[tile.row].sequence.tokens[tile.start : tile.end])
    for row_tiles in offsets:
        row_tiles.sort(key=lambda pair: pair[1].start)
    tables.update(rows)
    tiles = [tile for group in groups for tile in group.tiles]
    starts, lengths, slots = torch.tensor([(tile.start, tile.length, tile.slot) for tile in tiles], device=device).T
    if len(token_ids) == len(tiles):
        positions = starts
    else:
        first = (starts + lengths - lengths.cumsum(0)).repeat_interleave(lengths)
        positions = first + torch.arange(len(token_ids), device=device)
        slots = slots.repeat_interleave(lengths)
    blocks = tables.lookup(slots, positions // BLOCK_SIZE)
    return StepBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=positions,
        write_index=cache.write_index(blocks, positions % BLOCK_SIZE),
        entered_blocks=torch.tensor(_entered_blocks(rows), dtype=torch.int64, device=device),
        groups=groups,
        offsets=offsets,
    )


def _entered_blocks(rows: list[StepRow]) -> list[int]:
    ends = ((row, row.start + row.length) for row in rows)
    return [
        row.sequence.blocks[end // BLOCK_SIZE]
        for row, end in ends
        if end % BLOCK_SIZE and end // BLOCK_SIZE * BLOCK_SIZE >= row.start
    ]


def _tiles(rows: list[StepRow]) -> list[Tile]:
    return [
        Tile(index, row.sequence.slot, start, min(TILE_TOKENS, row.start + row.length - start))
        for index, row in enumerate(rows)
        for start in range(row.start, row.start + row.length, TILE_TOKENS)
    ]


def _groups(tiles: list[Tile], window: int | None) -> list[TileGroup]:
    """Group tiles, largest first; a tile joins the previous group unless the padding costs more than a new group."""

    def keys(tile: Tile) -> int:
        return tile.end if window is None else min(tile.end, tile.length + window)

    groups: list[TileGroup] = []
    members: list[Tile] = []
    first = widest = pairs = 0
    for tile in sorted(tiles, key=lambda tile: (tile.length, keys(tile)), reverse=True):
        if members:
            queries, width = members[0].length, max(widest, keys(tile))
            padded_keys = (len(members) + 1) * width
            padded_pairs = padded_keys * queries
            waste = padded_pairs - pairs - tile.length * keys(tile)
            if waste > GROUP_COST or padded_pairs > MAX_GROUP_PAIRS or padded_keys > MAX_GROUP_KEYS:
                groups.append(_group(members, first))
                first += groups[-1].tokens
                members, widest, pairs = [], 0, 0
        members.append(tile)
        widest = max(widest, keys(tile))
        pairs += tile.length * keys(tile)
    return [*groups, _group(members, first)]


def _group(tiles: list[Tile], first: int) -> TileGroup:
    return TileGroup(tiles, first, sum(tile.length for tile in tiles), tiles[0].length)
