"""The flat batch of a step on a CPU: the tokens of all rows in one dimension, grouped for attention.

The tokens of a row are cut into *tiles* of at most TILE_TOKENS, so that a long chunk attends tile by tile and each tile reads
only the keys before its end. Tiles of similar size form a *tile group*, which attends as one padded batch. The flat order is
the order of the groups; a decode row is a tile of one token, or of several if it has drafts.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE, PagedKVCache, WriteIndex
from text_generation_shard.engines.torch.batch.step_plan import StepPlan

TILE_TOKENS = 128
GROUP_COST = 2048
"""Cost of one more group, in padded (query, key) pairs; measured on CPU."""
MAX_GROUP_PAIRS = 1 << 18
"""Largest number of (query, key) pairs of a group: bounds the memory of its scores."""
MAX_GROUP_KEYS = 1 << 13
"""Largest number of keys of a group: bounds the size of its gathered keys and values, so that they fit the CPU cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Positions [start, start + length) of a row."""

    slot: int
    start: int
    length: int
    place: int
    """The index of its first token in the plan of the step."""

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
    """Inputs of a step; n tokens in total."""

    token_ids: Tensor
    """[n]"""
    positions: Tensor
    """[n]"""
    write_index: WriteIndex
    """Cache positions of the tokens' keys and values: see `PagedKVCache.write`."""
    entered_blocks: Tensor
    """[groups, blocks]: those that a row starts but does not fill in all layers in this step, to be cleared first."""
    groups: list[TileGroup]
    places: Tensor
    """[n]: the index of each token in the plan."""
    plan: StepPlan

    def in_plan_order(self, values: Tensor) -> Tensor:
        """Return `values` [n, …] of the flat order in the order of the plan."""
        return torch.empty_like(values).index_copy_(0, self.places, values)


def build_batch(
    plan: StepPlan, tables: Tensor, last_tokens: Tensor, cache: PagedKVCache, window: int | None, *, fills: bool = True
) -> StepBatch:
    """Build the batch of a plan. `window` is the longest sliding window if every layer has one, else None.

    `fills`: the step writes to all layers.
    `tables` [groups, slots, blocks] are the block tables, `last_tokens` [slots] the tokens sampled last.
    """
    tiles = _tiles(plan)
    groups = _groups(tiles, window)
    first, lengths = torch.tensor([(tile.place, tile.length) for group in groups for tile in group.tiles]).T
    ends = lengths.cumsum(0)
    places = (first + lengths - ends).repeat_interleave(lengths) + torch.arange(int(ends[-1]))
    ids, positions, slots = (
        torch.from_numpy(plan.column(name)).long()[places] for name in ("ids", "positions", "slots")
    )
    return StepBatch(
        token_ids=torch.where(ids >= 0, ids, last_tokens[slots].long()),
        positions=positions,
        write_index=cache.write_index(tables[:, slots, positions // BLOCK_SIZE].long(), positions % BLOCK_SIZE),
        entered_blocks=_entered_blocks(tiles, tables, fills=fills),
        groups=groups,
        places=places,
        plan=plan,
    )


def _entered_blocks(tiles: list[Tile], tables: Tensor, *, fills: bool) -> Tensor:
    starts = {tile.slot: tile.start for tile in reversed(tiles)}
    ends = {tile.slot: tile.end for tile in tiles}
    entered = [
        (slot, index)
        for slot, end in ends.items()
        for index in range(-(-starts[slot] // BLOCK_SIZE), -(-end // BLOCK_SIZE))
        if not fills or (index + 1) * BLOCK_SIZE > end
    ]
    slots, indices = torch.tensor(entered, dtype=torch.int64).view(-1, 2).T
    return tables[:, slots, indices].long()


def _tiles(plan: StepPlan) -> list[Tile]:
    """Return the tiles in the order of the plan; a slot has one row."""
    decoding = plan.num_decoding
    slots, positions = plan.column("slots"), plan.column("positions")
    pairs = zip(slots[:decoding].tolist(), positions[:decoding].tolist(), strict=True)
    tiles: list[Tile] = []
    for place, (slot, position) in enumerate(pairs):
        if tiles and tiles[-1].slot == slot and tiles[-1].end == position:  # a draft
            tiles[-1] = replace(tiles[-1], length=tiles[-1].length + 1)
        else:
            tiles.append(Tile(slot, position, 1, place))
    ends = (plan.column("query_indptr") + decoding).tolist()
    for first, end in pairwise(ends):
        slot, start = int(slots[first]), int(positions[first])
        for place in range(first, end, TILE_TOKENS):
            tiles.append(Tile(slot, start + place - first, min(TILE_TOKENS, end - place), place))
    return tiles


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
