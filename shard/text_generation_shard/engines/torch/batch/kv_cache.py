"""The shape of the KV cache, and the paged KV cache of a CPU.

A block holds, for one layer, [key or value, KV head, token in block, head_dim]. The tokens of a head are contiguous, so one
`index_select` over (block, key or value, head) returns keys and values in the layout that attention multiplies. A layer with latent
attention has one row of a token, which is the key of all heads, and whose first numbers are the value: [token in block, head_dim].

Attention reads whole blocks and masks positions past the end of a sequence. A mask hides finite numbers only: 0 × NaN is NaN.
A partly filled block is therefore cleared when a sequence enters it, so that no data of its previous owner can leak. Where a
sequence is padded to the length of another, it reads its own last block again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from text_generation_proto.cache_groups import CacheGroup


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The heads of one layer on one rank, and the positions that they attend to."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Number of positions that a token attends to, including its own; None: all."""
    chunk: int | None = None
    """Positions are divided into chunks of this length, and a token attends to its own chunk alone; None: not divided."""
    latent: int = 0
    """Numbers of a latent row that are the value; 0: values are stored beside the keys."""
    bidirectional_images: bool = False
    """True: a token of an image attends to the later tokens of the same image too."""

    @property
    def vectors(self) -> int:
        """Vectors of head_dim that the cache holds of a token: keys and values of all KV heads, or one latent row."""
        return 1 if self.latent else 2 * self.num_kv_heads

    @property
    def rotated_dim(self) -> int:
        """Numbers of a query or a key that the rotation reads."""
        return self.head_dim - self.latent

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim

    def first_position(self, position: int) -> int:
        """Return the first position that the token at `position` attends to."""
        first = 0 if self.window is None else position - self.window + 1
        return max(0, first, 0 if self.chunk is None else position // self.chunk * self.chunk)


BLOCK_SIZE = 16
"""Tokens in a block."""


WriteIndex = Mapping[tuple[int, int], Tensor]
"""The index that `PagedKVCache.write` needs, by the group and `LayerShape.vectors` of the layer."""


FP8_DTYPES = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Types of an FP8 cache by the values of --kv-cache-dtype."""


@dataclass(frozen=True, slots=True)
class Fp8Cache:
    """Keys and values in FP8: the nearest numbers to their quotients by a scale, at most the largest number of the type."""

    dtype: torch.dtype
    scales: Mapping[int, Tensor] = field(default_factory=dict)
    """float32 [2, KV heads] of some layers, keys first; those of the others are 1."""

    def quantize(self, layer: int, keys_values: Tensor) -> Tensor:
        """Return `keys_values` [tokens, 2 · KV heads, head_dim] as they are stored."""
        largest, scales = torch.finfo(self.dtype).max, self.scales.get(layer)
        quotients = keys_values.float() if scales is None else keys_values / scales.view(1, -1, 1)
        return quotients.clamp(-largest, largest).to(self.dtype)


@dataclass(frozen=True)
class CacheShape:
    """Shape of the KV cache, layer by layer, and its dtype. The groups of the cache follow from it.

    Layers with the same sliding window form a group; the first group has all others. The states of other layers form the last one.
    """

    layers: tuple[LayerShape, ...]
    device: torch.device
    dtype: torch.dtype
    """The dtype of queries, and of keys and values before they are stored."""
    longest: int = 0
    """Positions of the longest sequence: a window that is not shorter has no group."""
    fp8: Fp8Cache | None = None
    """None: keys and values are stored in `dtype`."""
    state_bytes: int = 0
    """Bytes of the states of a sequence; 0 without layers that have any."""

    @property
    def stored(self) -> torch.dtype:
        """The dtype of keys and values in the cache."""
        return self.dtype if self.fp8 is None else self.fp8.dtype

    @property
    def scales(self) -> Mapping[int, Tensor]:
        return {} if self.fp8 is None else self.fp8.scales

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each group of KV blocks."""
        shorter = {layer.window for layer in self.layers if layer.window is not None and layer.window < self.longest}
        return None, *sorted(shorter)

    @property
    def kinds(self) -> tuple[CacheGroup, ...]:
        """All groups, without blocks."""
        windows = tuple(CacheGroup(0, window) for window in self.windows)
        return (*windows, CacheGroup(0, is_state=True)) if self.state_bytes else windows

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The group of each layer."""
        numbers = {window: group for group, window in enumerate(self.windows)}
        return tuple(numbers.get(layer.window, 0) for layer in self.layers)

    def allocate(self, num_blocks: Sequence[int]) -> list[Tensor]:
        """Allocate `num_blocks` blocks of each group, uninitialized.

        For each layer: [blocks, key or value, KV heads, BLOCK_SIZE, head_dim]; [blocks, 1, 1, BLOCK_SIZE, head_dim] of latent rows.
        """
        return [
            torch.empty(
                (num_blocks[group], each.vectors // each.num_kv_heads, each.num_kv_heads, BLOCK_SIZE, each.head_dim),
                device=self.device,
                dtype=self.stored,
            )
            for group, each in zip(self.groups, self.layers, strict=True)
        ]

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each of all groups, over all its layers."""
        dims = [0] * len(self.windows)
        for group, layer in zip(self.groups, self.layers, strict=True):
            dims[group] += layer.vectors * layer.head_dim
        paged = tuple(BLOCK_SIZE * each * self.stored.itemsize for each in dims)
        return (*paged, self.state_bytes) if self.state_bytes else paged


class PagedKVCache:
    """The blocks of each group, numbered 0 <= block < `num_blocks`, on a CPU."""

    def __init__(self, shape: CacheShape, num_blocks: Sequence[int]) -> None:
        self._fp8, self._scales = shape.fp8, shape.scales
        self._kinds = [(group, layer.vectors) for group, layer in zip(shape.groups, shape.layers, strict=True)]
        counts = {vectors for _, vectors in self._kinds}
        # Not zeroed: every block is written or cleared before it is read, and an unused block is never committed.
        self.layers = shape.allocate(num_blocks)
        self._tokens = [layer.view(-1, layer.shape[-1]) for layer in self.layers]
        self._pairs = [layer.view(-1, BLOCK_SIZE * layer.shape[-1]) for layer in self.layers]
        self._pair_offsets = {count: torch.arange(count, device=shape.device) * BLOCK_SIZE for count in counts}
        self._head_offsets = {
            count: torch.arange(count, device=shape.device).view(min(count, 2), 1, -1, 1) for count in counts
        }

    def write_index(self, blocks: Tensor, offsets: Tensor) -> WriteIndex:
        """Return the index that `write` needs for tokens at `offsets` [tokens] of blocks [groups, tokens]."""
        return {
            (group, count): (
                (blocks[group] * (count * BLOCK_SIZE) + offsets).unsqueeze(1) + self._pair_offsets[count]
            ).flatten()
            for group, count in set(self._kinds)
        }

    def write(self, layer: int, index: WriteIndex, keys_values: Tensor) -> None:
        """Store `keys_values` [tokens, vectors, head_dim], keys first."""
        tokens = self._tokens[layer]
        if self._fp8 is not None:
            # Bytes: torch copies no FP8 by an index.
            tokens = tokens.view(torch.uint8)
            keys_values = self._fp8.quantize(layer, keys_values).view(torch.uint8)
        tokens.index_copy_(0, index[self._kinds[layer]], keys_values.reshape(-1, tokens.shape[1]))

    def read_index(self, blocks: Tensor, vectors: int) -> Tensor:
        """Return the index that `read` needs for block tables [sequences, blocks], in layers with that many vectors of a token."""
        return (blocks.unsqueeze(1) * vectors + self._head_offsets[vectors]).flatten()

    def read(self, layer: int, index: Tensor, out: Tensor) -> None:
        """Copy keys and values to `out`, which has the layout [2, sequences, KV heads, tokens, head_dim], or 1 for 2 if they are rows."""
        pairs = self._pairs[layer]
        out = out.view(-1, pairs.shape[1])
        if self._fp8 is None:
            torch.index_select(pairs, 0, index, out=out)
            return
        out.copy_(torch.index_select(pairs, 0, index))
        if (scales := self._scales.get(layer)) is not None:
            out.mul_(scales.flatten()[index % scales.numel()].unsqueeze(1))

    def clear(self, blocks: Tensor) -> None:
        """Zero blocks [groups, blocks] in every layer of their group."""
        for (group, _), layer in zip(self._kinds, self.layers, strict=True):
            layer.view(torch.uint8).index_fill_(0, blocks[group], 0)
