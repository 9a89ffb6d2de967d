"""PrefixTree: which runs of tokens have their KV in which blocks of one replica.

A path-compressed radix tree over full blocks, one root a salt. A key is bytes: token ids as little-endian uint32, a
multiple of the block's bytes, so that runs are compared by memcmp and a child is found by the exact bytes of its first
block: there are no hashes to collide. What is locked stays; of the rest, the leaves used least recently go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

_BYTES_PER_TOKEN = 4
_STALE_ALLOWED = 64


class Node:
    """A run of blocks, and what may follow it. Callers hold it as a lock and look at nothing."""

    __slots__ = ("blocks", "children", "created", "key", "last_used", "locks", "parent", "salt")

    def __init__(self, parent: Node | None, key: bytearray, blocks: list[int], created: int, salt: str = "") -> None:
        # None: this is the root of its salt, and has no block.
        self.parent = parent
        # A bytearray: it grows, and loses either end, without being copied.
        self.key = key
        self.blocks = blocks
        # By the bytes of the child's first block.
        self.children: dict[bytes, Node] = {}
        # Its own, and one for each child that has any. So a lock guards the path above it, and counts only up to where
        # that path is locked already.
        self.locks = 0
        self.created = created
        # When a lock on it was last dropped. The use of a child is passed to its parent when the child is evicted: until
        # then the parent is no leaf, and nobody asks.
        self.last_used = created
        self.salt = salt


class PrefixTree:
    """The cached prefixes of one replica.

    A block given to `extend` belongs to the tree until `evict` hands it out. A lock is a node that `acquire` or
    `extend` returned, until `release`; it guards every block from the salt's root down to the node's end.
    """

    def __init__(self, block_size: int) -> None:
        self._block_bytes = _BYTES_PER_TOKEN * block_size
        self._block_size = block_size
        self._clear_at(0)

    def _clear_at(self, now: int) -> None:
        self._now = now
        self._void_before = now
        self._roots: dict[str, Node] = {}
        self._cached = 0
        self._evictable = 0
        # (last used, created, node): one entry for each unlocked leaf, and those of leaves that were locked since.
        self._leaves: list[tuple[int, int, Node]] = []
        self._stale = 0

    @property
    def cached_blocks(self) -> int:
        """Blocks in the tree."""
        return self._cached

    @property
    def evictable_blocks(self) -> int:
        """Blocks that `evict` could give now: those on no locked path."""
        return self._evictable

    def peek(self, salt: str, key: bytes) -> int:
        """Tokens of the longest prefix of `key` that is here, in whole blocks. Changes nothing."""
        root = self._roots.get(salt)
        if root is None:
            return 0
        _, covered, _, inside = self._descend(root, key)
        return (covered + inside) // _BYTES_PER_TOKEN

    def acquire(self, salt: str, key: bytes) -> tuple[Node, list[int]]:
        """Lock the longest prefix of `key` that is here: its last node (the salt's root if it is empty) and its blocks."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, bytearray(), [], self._tick(), salt)
        node, _, child, inside = self._descend(root, key)
        if child is not None:
            node = self._split(child, inside)
        self._lock(node)
        return node, _blocks_to(node)

    def extend(self, node: Node, key: bytes, blocks: Sequence[int]) -> tuple[Node, int]:
        """Add below `node` the run `key` of full blocks, whose KV is in `blocks`. The caller's lock on `node` moves to its end.

        Returns the node at the run's end, and how many leading blocks of the run were here already: those of `blocks`
        stay the caller's; the others are the tree's from now on.
        """
        assert len(key) == len(blocks) * self._block_bytes, "a run that is not one key of full blocks"
        assert node.locks > 0, "extended below a node that is not locked"
        assert node.created >= self._void_before, "extended below a node of before the tree was cleared"
        end, covered, child, inside = self._descend(node, key)
        if child is not None:
            end = self._split(child, inside)
            covered += inside
        if end is not node:
            self._lock(end)
            node.locks -= 1  # never its last: its child towards `end` is locked now
        present = covered // self._block_bytes
        if present < len(blocks):
            end = self._append(end, key[covered:], blocks[present:])
        return end, present

    def release(self, node: Node) -> None:
        """Drop one lock of `node`. Does nothing if the tree was cleared since it was taken."""
        if node.created < self._void_before:
            return
        assert node.locks > 0, "a lock was dropped twice"
        node.last_used = self._tick()
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            if at.locks:
                return
            self._evictable += len(at.blocks)
            if not at.children:
                self._became_free_leaf(at)
            at = at.parent

    def evict(self, count: int) -> list[int]:
        """Take up to `count` blocks out of the tree: from the unlocked leaf used least recently, then the next.

        A leaf that has more than is needed loses its tail.
        """
        taken: list[int] = []
        while self._leaves and len(taken) < count:
            node = self._leaves[0][2]
            if _is_stale(self._leaves[0]):
                heappop(self._leaves)
                self._stale -= 1
                continue
            wanted = count - len(taken)
            if wanted < len(node.blocks):
                taken += node.blocks[-wanted:]
                del node.blocks[-wanted:]
                del node.key[-wanted * self._block_bytes :]
            else:
                heappop(self._leaves)
                taken += node.blocks
                self._detach(node)
        self._cached -= len(taken)
        self._evictable -= len(taken)
        return taken

    def clear(self) -> None:
        """Forget everything, locked or not. Nodes handed out before are void: to release them does nothing."""
        self._clear_at(self._now + 1)

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _descend(self, node: Node, key: bytes) -> tuple[Node, int, Node | None, int]:
        """Follow `key` from the end of `node`.

        Returns the last node that it covers whole, the bytes of `key` used so far, and, if it then goes part of the way
        through a child, that child and the bytes of it that are covered (at least a block).
        """
        size = self._block_bytes
        at = 0
        while (child := node.children.get(key[at : at + size])) is not None:
            if not key.startswith(child.key, at):
                return node, at, child, self._common_bytes(child.key, key, at)
            node = child
            at += len(child.key)
        return node, at, None, 0

    def _common_bytes(self, run: bytearray, key: bytes, at: int) -> int:
        """Bytes of the whole blocks that `run` and `key` from `at` on share; they share the first, and not all of `run`."""
        # A binary search, in which each stretch is compared in place: about one pass over the bytes.
        size = self._block_bytes
        same, differ = 1, min(len(run), len(key) - at) // size + 1
        with memoryview(run) as view:
            while differ - same > 1:
                middle = (same + differ) // 2
                if key.startswith(view[same * size : middle * size], at + same * size):
                    same = middle
                else:
                    differ = middle
        return same * size

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after its first `at` bytes. It stays the lower part, for those who hold it; returns the upper."""
        size = self._block_bytes
        assert node.parent is not None, "a root was split"
        upper = Node(node.parent, node.key[:at], node.blocks[: at // size], self._tick())
        upper.locks = 1 if node.locks else 0
        upper.children[bytes(node.key[at : at + size])] = node
        node.parent.children[bytes(node.key[:size])] = upper
        node.parent = upper
        del node.key[:at]
        del node.blocks[: at // size]
        return upper

    def _append(self, node: Node, key: bytes, blocks: Sequence[int]) -> Node:
        """Put a run that shares no block with the children of `node` below it, and move the caller's lock to its end."""
        self._cached += len(blocks)
        if node.parent is not None and not node.children and node.locks == 1:
            # Nobody else knows where this node ends. So what one request adds block by block stays one node.
            node.key += key
            node.blocks += blocks
            return node
        child = Node(node, bytearray(key), list(blocks), self._tick())
        # The parent's count stays: it loses the caller's lock and gains a locked child.
        child.locks = 1
        node.children[key[: self._block_bytes]] = child
        return child

    def _lock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.locks += 1
            if at.locks > 1:
                return
            self._evictable -= len(at.blocks)
            if not at.children and at.parent is not None:
                self._stale += 1
                self._drop_stale()
            at = at.parent

    def _became_free_leaf(self, node: Node) -> None:
        if node.parent is None:
            # An empty salt is forgotten, or clients that make salts up would fill the memory.
            del self._roots[node.salt]
        else:
            heappush(self._leaves, (node.last_used, node.created, node))

    def _detach(self, leaf: Node) -> None:
        """Take an unlocked leaf out of the tree; its parent may be the next."""
        parent = leaf.parent
        assert parent is not None, "a root was evicted"
        del parent.children[bytes(leaf.key[: self._block_bytes])]
        parent.last_used = max(parent.last_used, leaf.last_used)
        if not parent.children and not parent.locks:
            self._became_free_leaf(parent)

    def _drop_stale(self) -> None:
        """Rebuild the heap when more than half of it is stale: O(1) amortised over the locks that made it so."""
        if self._stale > _STALE_ALLOWED + len(self._leaves) // 2:
            self._leaves = [entry for entry in self._leaves if not _is_stale(entry)]
            heapify(self._leaves)
            self._stale = 0


def _is_stale(entry: tuple[int, int, Node]) -> bool:
    """Whether an entry of the heap of unlocked leaves names a node that is none, or was used since."""
    last_used, _, node = entry
    return node.locks > 0 or bool(node.children) or node.last_used != last_used


def _blocks_to(node: Node) -> list[int]:
    """The blocks from the root to the end of `node`, in order."""
    path: list[list[int]] = []
    at: Node | None = node
    while at is not None:
        path.append(at.blocks)
        at = at.parent
    blocks: list[int] = []
    for part in reversed(path):
        blocks += part
    return blocks
