"""Copies of blocks between the device and the host cache, as both sides of the wire know them."""

from typing import NamedTuple


class CopiedBlocks(NamedTuple):
    """Blocks of a group, in columns."""

    device: tuple[int, ...] = ()
    host: tuple[int, ...] = ()
    tags: tuple[int, ...] = ()
    """Numbers of 32 bits: a block is loaded only if it is the one that was stored with its tag."""


class Copy(NamedTuple):
    """A copy to begin at a step boundary."""

    number: int
    is_load: bool
    """From the host to the device; else a store."""
    groups: tuple[CopiedBlocks, ...]
    """By group of the cache."""

    @property
    def num_blocks(self) -> int:
        return sum(len(group.host) for group in self.groups)


class CopyEnd(NamedTuple):
    number: int
    failed: tuple[int, ...] = ()
    """Indices of the blocks that were not copied, or whose checksum was wrong, counted over all groups."""
