"""What one step computes, laid out flat: the tokens of every row side by side, grouped for attention.

A row's tokens are cut into *spans* of at most SPAN_TOKENS, so that a long chunk attends tile by tile, each to no more than
the keys before its end. Spans of similar size form a *group*, which attends as one padded batch. The flat order is the
order of the groups; a decode row is a span of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE, BlockTables, KVCache
from text_generation_shard.step.sequence import Row

SPAN_TOKENS = 128
GROUP_COST = 2048
"""What an additional group costs, in padded (query, key) pairs; measured on CPU."""
MAX_GROUP_PAIRS = 1 << 18
"""(query, key) pairs of a group: bounds the memory of its scores."""
MAX_GROUP_KEYS = 1 << 14
"""Keys of a group: bounds the memory of what it reads from the cache, so that it stays in the processor's."""


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, start + length) of a row; `row` is its place in the step."""

    row: int
    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Group:
    """Spans that attend together, padded to the longest: tokens [first, first + tokens) of the flat order."""

    spans: list[Span]
    first: int
    tokens: int
    queries: int
    """Tokens of the longest span."""

    @property
    def is_padded(self) -> bool:
        return self.tokens < len(self.spans) * self.queries


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's inputs on the device; n tokens in all."""

    token_ids: Tensor
    """[n]"""
    positions: Tensor
    """[n]"""
    write_index: Tensor
    """Where the tokens' keys and values go: see `KVCache.write`."""
    entered_blocks: Tensor
    """Blocks that a row enters without filling them: to be cleared first."""
    groups: list[Group]
    offsets: list[list[tuple[int, Span]]]
    """For each row its spans in order of position, each with its place in the flat order."""

    def last_token(self, row: int) -> int:
        """Place of a row's last token in the flat order."""
        offset, span = self.offsets[row][-1]
        return offset + span.length - 1


def build_batch(
    rows: list[Row], tables: BlockTables, cache: KVCache, window: int | None, device: torch.device
) -> StepBatch:
    """Lay out `rows`. `window` is the longest sliding window if every layer has one."""
    groups = _groups(_spans(rows), window)
    token_ids: list[int] = []
    offsets: list[list[tuple[int, Span]]] = [[] for _ in rows]
    for group in groups:
        for span in group.spans:
            offsets[span.row].append((len(token_ids), span))
            token_ids.extend(rows[span.row].sequence.tokens[span.start : span.end])
    for places in offsets:
        places.sort(key=lambda place: place[1].start)
    tables.update(rows)
    spans = [span for group in groups for span in group.spans]
    starts, lengths, slots = torch.tensor([(span.start, span.length, span.slot) for span in spans], device=device).T
    if len(token_ids) == len(spans):
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


def _entered_blocks(rows: list[Row]) -> list[int]:
    ends = ((row, row.start + row.length) for row in rows)
    return [
        row.sequence.blocks[end // BLOCK_SIZE]
        for row, end in ends
        if end % BLOCK_SIZE and end // BLOCK_SIZE * BLOCK_SIZE >= row.start
    ]


def _spans(rows: list[Row]) -> list[Span]:
    return [
        Span(index, row.sequence.slot, start, min(SPAN_TOKENS, row.start + row.length - start))
        for index, row in enumerate(rows)
        for start in range(row.start, row.start + row.length, SPAN_TOKENS)
    ]


def _groups(spans: list[Span], window: int | None) -> list[Group]:
    """Largest spans first; a span joins the group before it unless the padding costs more than a group of its own."""

    def keys(span: Span) -> int:
        return span.end if window is None else min(span.end, span.length + window)

    groups: list[Group] = []
    members: list[Span] = []
    first = widest = pairs = 0
    for span in sorted(spans, key=lambda span: (span.length, keys(span)), reverse=True):
        if members:
            queries, width = members[0].length, max(widest, keys(span))
            padded_keys = (len(members) + 1) * width
            padded_pairs = padded_keys * queries
            waste = padded_pairs - pairs - span.length * keys(span)
            if waste > GROUP_COST or padded_pairs > MAX_GROUP_PAIRS or padded_keys > MAX_GROUP_KEYS:
                groups.append(_group(members, first))
                first += groups[-1].tokens
                members, widest, pairs = [], 0, 0
        members.append(span)
        widest = max(widest, keys(span))
        pairs += span.length * keys(span)
    return [*groups, _group(members, first)]


def _group(spans: list[Span], first: int) -> Group:
    return Group(spans, first, sum(span.length for span in spans), spans[0].length)
