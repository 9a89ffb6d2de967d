"""The nodes of a prefix tree, and a prefix that is found there: see `prefix_tree`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from text_generation_router.scheduling.window_pool import GroupBlock


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks and its continuations. To callers it is an opaque lock."""

    parent: "Node | None"
    """None for the root of a salt, which has no block."""
    key: bytearray
    """A bytearray: both ends change without a copy."""
    blocks: list[int]
    further: list[list[GroupBlock]]
    """As many blocks of each further group, NO_BLOCK where there is none."""
    created: int
    salt: str = ""
    children: "dict[bytes, Node]" = field(default_factory=dict)
    """By the bytes of the child's first block."""
    locks: int = 0
    """Own locks plus one per locked child. So a lock guards the path above it, and locking stops at the first ancestor that is
    locked already."""
    last_used: int = 0
    """Time of the last release. A parent takes over the time of an evicted child; before that it is not a leaf, and the time is
    not read."""
    owners: set[str] = field(default_factory=set)
    """The tenants that computed or reused this run. Those of a child are among those of its parent."""


Run = tuple[str, int | None, bytes, Sequence[int]]
"""Blocks that entered a tree: (salt, block before them, key, blocks). Without a block before them they are at the root of the salt."""


@dataclass(slots=True)
class Prefix:
    """A cached prefix, found and not locked. Valid until the tree changes."""

    salt: str
    node: "Node | None"
    """The last node that it covers whole; None if nothing is cached with its salt."""
    child: "Node | None"
    inside: int
    """The bytes that it covers of a child of that node, which is `child` if there are any."""
    blocks: int
    further: Sequence[list[GroupBlock]]
    """The last of its blocks of each further group: those that a sequence needs which continues here."""
    branch: int = 0
    """Blocks that the key shares with a cached one that goes on otherwise, though not all groups accept them."""

    @property
    def evictable_blocks(self) -> int:
        """Its blocks that no sequence uses: a lock makes them unavailable."""
        count, at = 0, self.node
        if self.child is not None and not self.child.locks:
            count += self.inside * len(self.child.blocks) // len(self.child.key)
        while at is not None and not at.locks:
            count += len(at.blocks)
            at = at.parent
        return count
