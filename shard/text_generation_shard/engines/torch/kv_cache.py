"""The paged KV cache: one pool of blocks for all layers, and where each sequence's tokens lie in it.

A block holds, for one layer, [key or value, KV head, token in block, head_dim]. So a head's tokens are contiguous, and one
`index_select` of (block, key or value, head) pieces brings keys and values in the order that attention multiplies them.

Attention reads whole blocks and masks what lies past a sequence's end. A mask hides finite numbers only: 0 × NaN is NaN.
So that nothing a former tenant left can leak, the block a sequence ends in is cleared when the sequence enters it; and
where it is padded to the length of another, a sequence reads its own last block again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.step.sequence import Row

BLOCK_SIZE = 16
"""Tokens in a block."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a KV cache holds for one token, and how."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Memory of one block over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * BLOCK_SIZE * self.head_dim * self.dtype.itemsize


class KVCache:
    """The pool. Blocks are numbered 0 <= block < num_blocks."""

    def __init__(self, shape: CacheShape, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pieces = 2 * shape.num_kv_heads
        """(key or value, KV head) pairs in a block."""
        # Not zeroed: whatever is read was written or cleared first, and on CPU a block never used is never committed.
        self._pool = torch.empty(
            shape.num_layers,
            num_blocks,
            self.pieces * BLOCK_SIZE * shape.head_dim,
            device=shape.device,
            dtype=shape.dtype,
        )
        self._tokens = [layer.view(-1, shape.head_dim) for layer in self._pool]
        self._pieces = [layer.view(-1, BLOCK_SIZE * shape.head_dim) for layer in self._pool]
        device = shape.device
        self._piece_offsets = torch.arange(self.pieces, device=device) * BLOCK_SIZE
        self._head_offsets = torch.arange(self.pieces, device=device).view(2, 1, shape.num_kv_heads, 1)

    def write_index(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Where `write` puts tokens [tokens], each at an offset of a block."""
        first = blocks * (self.pieces * BLOCK_SIZE) + offsets
        return (first.unsqueeze(1) + self._piece_offsets).flatten()

    def write(self, layer: int, index: Tensor, keys_values: Tensor) -> None:
        """Store [tokens, 2 · KV heads, head_dim], keys first."""
        tokens = self._tokens[layer]
        tokens.index_copy_(0, index, keys_values.reshape(-1, tokens.shape[1]))

    def read_index(self, blocks: Tensor) -> Tensor:
        """What `read` brings for a table of blocks [sequences, blocks]."""
        return (blocks.unsqueeze(1) * self.pieces + self._head_offsets).flatten()

    def read(self, layer: int, index: Tensor, out: Tensor) -> None:
        """Copy keys and values to `out`, seen as [2, sequences, KV heads, tokens, head_dim]."""
        pieces = self._pieces[layer]
        torch.index_select(pieces, 0, index, out=out.view(-1, pieces.shape[1]))

    def clear(self, blocks: Tensor) -> None:
        """Zero some blocks in every layer."""
        self._pool.index_fill_(1, blocks, 0.0)


class BlockTables:
    """The block numbers of the sequences in every slot, as one tensor kept up to date step by step."""

    def __init__(self, max_slots: int, max_sequence_length: int, device: torch.device) -> None:
        self._max_blocks = -(-max_sequence_length // BLOCK_SIZE)
        self._table = torch.zeros(max_slots, self._max_blocks, dtype=torch.int64, device=device)

    def update(self, rows: list[Row]) -> None:
        """Take in the blocks that came since a sequence's last step."""
        for row in rows:
            sequence = row.sequence
            told = sequence.told_blocks
            blocks = sequence.blocks[told : self._max_blocks]
            if blocks:
                self._table[sequence.slot, told : told + len(blocks)] = torch.tensor(blocks, device=self._table.device)
                sequence.told_blocks += len(blocks)

    def lookup(self, slots: Tensor, indices: Tensor) -> Tensor:
        """The block number at each (slot, index in its table); the two broadcast."""
        return self._table[slots, indices]
