"""The paged KV cache: one pool of blocks for all layers, and the block tables of the sequences.

A block holds, for one layer, [key or value, KV head, token in block, head_dim]. The tokens of a head are contiguous, so one
`index_select` over (block, key or value, head) returns keys and values in the layout that attention multiplies.

Attention reads whole blocks and masks positions past the end of a sequence. A mask hides finite numbers only: 0 × NaN is NaN.
A partly filled block is therefore cleared when a sequence enters it, so that no data of its previous owner can leak. Where a
sequence is padded to the length of another, it reads its own last block again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.step.sequence import StepRow

BLOCK_SIZE = 16
"""Tokens in a block."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape and dtype of the KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * BLOCK_SIZE * self.head_dim * self.dtype.itemsize


class PagedKVCache:
    """The pool of blocks, numbered 0 <= block < num_blocks."""

    def __init__(self, shape: CacheShape, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pairs_per_block = 2 * shape.num_kv_heads
        """(key or value, KV head) pairs in a block."""
        # Not zeroed: every block is written or cleared before it is read, and on CPU an unused block is never committed.
        self._pool = torch.empty(
            shape.num_layers,
            num_blocks,
            self.pairs_per_block * BLOCK_SIZE * shape.head_dim,
            device=shape.device,
            dtype=shape.dtype,
        )
        self._tokens = [layer.view(-1, shape.head_dim) for layer in self._pool]
        self._pairs = [layer.view(-1, BLOCK_SIZE * shape.head_dim) for layer in self._pool]
        device = shape.device
        self._pair_offsets = torch.arange(self.pairs_per_block, device=device) * BLOCK_SIZE
        self._head_offsets = torch.arange(self.pairs_per_block, device=device).view(2, 1, shape.num_kv_heads, 1)

    def write_index(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Return the index that `write` needs for tokens [tokens], each at an offset of a block."""
        first = blocks * (self.pairs_per_block * BLOCK_SIZE) + offsets
        return (first.unsqueeze(1) + self._pair_offsets).flatten()

    def write(self, layer: int, index: Tensor, keys_values: Tensor) -> None:
        """Store `keys_values` [tokens, 2 · KV heads, head_dim], keys first."""
        tokens = self._tokens[layer]
        tokens.index_copy_(0, index, keys_values.reshape(-1, tokens.shape[1]))

    def read_index(self, blocks: Tensor) -> Tensor:
        """Return the index that `read` needs for block tables [sequences, blocks]."""
        return (blocks.unsqueeze(1) * self.pairs_per_block + self._head_offsets).flatten()

    def read(self, layer: int, index: Tensor, out: Tensor) -> None:
        """Copy keys and values to `out`, which has the layout [2, sequences, KV heads, tokens, head_dim]."""
        pairs = self._pairs[layer]
        torch.index_select(pairs, 0, index, out=out.view(-1, pairs.shape[1]))

    def clear(self, blocks: Tensor) -> None:
        """Zero the given blocks in every layer."""
        self._pool.index_fill_(1, blocks, 0.0)


class BlockTables:
    """The block tables of all slots in one tensor, updated before each step."""

    def __init__(self, max_slots: int, max_sequence_length: int, device: torch.device) -> None:
        self._max_blocks = -(-max_sequence_length // BLOCK_SIZE)
        self._table = torch.zeros(max_slots, self._max_blocks, dtype=torch.int64, device=device)

    def update(self, rows: list[StepRow]) -> None:
        """Add the blocks that sequences received since their last step."""
        for row in rows:
            sequence = row.sequence
            known = sequence.synced_blocks
            blocks = sequence.blocks[known : self._max_blocks]
            if blocks:
                self._table[sequence.slot, known : known + len(blocks)] = torch.tensor(
                    blocks, device=self._table.device
                )
                sequence.synced_blocks += len(blocks)

    def lookup(self, slots: Tensor, indices: Tensor) -> Tensor:
        """Return the block number at each (slot, index in its table); the two broadcast."""
        return self._table[slots, indices]
