"""PrefixTree: the prefix cache of one replica, from runs of tokens to the KV blocks that hold them.

A path-compressed radix tree over full blocks, one root per salt. A key is bytes: token ids as little-endian uint32, a
multiple of the block's bytes. Runs are compared by memcmp, and a child is found by the exact bytes of its first block:
there are no hashes to collide. Locked paths stay; other leaves are evicted, least recently used first.

These are the blocks of the first group of the cache. Each position also names its block of each further group, or lacks it: a
prefix is found only as far as all groups accept it. What a further group holds and evicts is up to its pool: see `window_pool`.
"""

from collections.abc import Iterator, Sequence

from text_generation_router.scheduling.keys import TOKEN_BYTES, common_bytes
from text_generation_router.scheduling.lazy_heap import Key, LazyHeap
from text_generation_router.scheduling.prefix_node import Node, Prefix, Run
from text_generation_router.scheduling.window_pool import GroupBlock, WindowPool

_Found = tuple[Node, int, Node | None, int]
"""The last node that a key covers whole, the bytes used so far, and, if it covers part of a child of that node, the child and
the bytes covered (at least a block)."""


class PrefixTree:
    """The cached prefixes of one replica.

    A block given to `extend` belongs to the tree until `evict` returns it. A lock is a node returned by `acquire` or
    `extend`, until `release`; it guards all blocks from the salt's root to the end of the node.
    """

    def __init__(self, block_size: int, pools: Sequence[WindowPool] = ()) -> None:
        self._block_size = block_size
        self._block_bytes = TOKEN_BYTES * block_size
        self._pools = pools
        """The blocks of the further groups."""
        self._now = 0
        """Counts releases and evicted blocks."""
        self._roots: dict[str, Node] = {}
        self.cached_blocks = 0
        """Blocks in the tree."""
        self.evictable_blocks = 0
        """Blocks that `evict` can return now: those on no locked path."""
        self._leaves: LazyHeap[Node] = LazyHeap(_by_last_use)
        """Unlocked leaves."""
        self.changes: list[Run | list[int]] | None = None
        """Runs that entered and blocks that left since `record`, until the caller takes them away; None before it."""

    def record(self) -> None:
        """Begin to list changes: first what is cached now."""
        self.changes, nodes = [], list(self._roots.values())
        for node in nodes:
            nodes += node.children.values()
            if (parent := node.parent) is not None:
                self._record(parent, bytes(node.key), node.blocks)

    def _record(self, parent: Node, key: bytes, blocks: Sequence[int]) -> None:
        """List blocks that entered the tree below `parent`."""
        if self.changes is not None:
            self.changes.append((parent.salt, parent.blocks[-1] if parent.blocks else None, key, [*blocks]))

    def peek(self, salt: str, key: bytes) -> int:
        """Return the tokens of the longest cached prefix of `key`, in whole blocks. Change nothing."""
        return self.find(salt, key).blocks * self._block_size

    def find(self, salt: str, key: bytes) -> Prefix:
        """Return the longest cached prefix of `key`. Change nothing."""
        if (root := self._roots.get(salt)) is None:
            return Prefix(salt, None, None, 0, 0, [[] for _ in self._pools])
        (node, covered, child, inside), further, branch = self._find(root, key)
        return Prefix(salt, node, child, inside, (covered + inside) // self._block_bytes, further, branch)

    def match(self, salt: str, key: bytes) -> Prefix:
        """Return the longest cached prefix of `key` in the first group alone. Change nothing."""
        nothing: Sequence[list[GroupBlock]] = [[] for _ in self._pools]
        if (root := self._roots.get(salt)) is None:
            return Prefix(salt, None, None, 0, 0, nothing)
        node, covered, child, inside = self._descend(root, key)
        return Prefix(salt, node, child, inside, (covered + inside) // self._block_bytes, nothing)

    def further(self, prefix: Prefix, group: int, count: int) -> list[GroupBlock]:
        """Return the last `count` blocks of a further group on the path of a prefix that is not empty."""
        assert prefix.node is not None
        if prefix.child is not None:
            return _last(prefix.child, prefix.inside // self._block_bytes, group, count)
        return _last(prefix.node, len(prefix.node.blocks), group, count)

    def lock(self, prefix: Prefix) -> tuple[Node, list[int]]:
        """Lock `prefix`. Return its last node (the salt's root if it is empty) and its blocks."""
        node = prefix.node
        if node is None:
            node = Node(None, bytearray(), [], [[] for _ in self._pools], self._tick(), prefix.salt)
            self._roots[prefix.salt] = node
        if prefix.child is not None:
            node = self._split(prefix.child, prefix.inside)
        self._lock(node)
        return node, self.blocks_to(node)

    def known_blocks(self, node: Node, owner: str) -> int:
        """Return the leading blocks of the path to `node` that `owner` computed or reused before."""
        at: Node | None = node
        while at is not None and owner not in at.owners:
            at = at.parent
        return 0 if at is None else len(self.blocks_to(at))

    def claim(self, node: Node, owner: str) -> None:
        """Record that `owner` computed or reused the path to `node`."""
        at: Node | None = node
        while at is not None and owner not in at.owners:
            at.owners.add(owner)
            at = at.parent

    def extend(
        self,
        node: Node,
        key: bytes,
        blocks: Sequence[int],
        owner: str = "",
        further: Sequence[Sequence[GroupBlock]] = (),
    ) -> tuple[Node, int]:
        """Add the run `key` below `node`, its KV in `blocks`. Move the caller's lock from `node` to the end of the run.

        Return the node at the end, and the number of leading blocks of the run that were cached already: of `blocks`
        these remain the caller's, the others become the tree's. The blocks of `further` groups are cached where there are none.
        """
        assert len(key) == len(blocks) * self._block_bytes, "the key of a run covers its blocks"
        assert node.locks > 0, "only a locked node is extended"
        end, covered, child, inside = self._descend(node, key)
        if child is not None:
            end = self._split(child, inside)
            covered += inside
        if end is not node:
            self._lock(end)
            node.locks -= 1  # stays above 0: its child towards `end` is locked now
        present = covered // self._block_bytes
        if present:
            if self._pools:
                self._fill(end, [run[:present] for run in further])
            key, blocks, further = key[covered:], blocks[present:], [run[present:] for run in further]
        if blocks:
            end = self._append(end, key, blocks, owner)
            if self._pools:
                for pool, cached, run in zip(self._pools, end.further, further, strict=True):
                    pool.cache(cached, run, len(cached))
        return end, present

    def release(self, node: Node, bonus: int = 0) -> None:
        """Drop one lock of `node`. It is evicted as if it was used `bonus` evicted blocks later."""
        assert node.locks > 0, "a lock is released once"
        node.last_used = max(node.last_used, self._tick() + bonus)
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            if at.locks:
                return
            self.evictable_blocks += len(at.blocks)
            if not at.children:
                self._became_free_leaf(at)
            at = at.parent

    def evict(self, count: int) -> list[int]:
        """Remove and return up to `count` blocks, from unlocked leaves in order of last use.

        A leaf with more blocks than needed loses its tail.
        """
        taken: list[int] = []
        while len(taken) < count and (node := self._leaves.first()) is not None:
            taken += self._trim(node, min(count - len(taken), len(node.blocks)))
        return taken

    def cut(self, node: Node, first: int) -> list[int]:
        """Remove and return the blocks of `node` from index `first` on, and those below it, but what locks guard."""
        below, taken = [node], list[int]()
        for each in below:
            below += each.children.values()
        for each in reversed(below):
            if not each.children and not each.locks:
                taken += self._trim(each, len(each.blocks) - (first if each is node else 0))
        return taken

    def _trim(self, leaf: Node, count: int) -> list[int]:
        """Remove and return the last `count` blocks of an unlocked leaf, at least one."""
        self._now += count
        taken = leaf.blocks[-count:]
        if self.changes is not None:
            self.changes.append(taken)
        for pool, run in zip(self._pools, leaf.further, strict=True):
            pool.forget(run[-count:])
            del run[-count:]
        del leaf.blocks[-count:]
        if leaf.blocks:
            del leaf.key[-count * self._block_bytes :]
        else:
            self._detach(leaf)
        self.cached_blocks -= count
        self.evictable_blocks -= count
        return taken

    def blocks_to(self, node: Node) -> list[int]:
        """Return the blocks from the root to the end of `node`, in order."""
        path: list[Node] = []
        at: Node | None = node
        while at is not None:
            path.append(at)
            at = at.parent
        blocks: list[int] = []
        for at in reversed(path):
            blocks += at.blocks
        return blocks

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _find(self, root: Node, key: bytes) -> tuple[_Found, Sequence[list[GroupBlock]], int]:
        """Do as `_descend` from a root, but only as far as all groups accept the prefix.

        Return also the last blocks of each further group, those needed to continue there, and `Prefix.branch`.
        """
        found = self._descend(root, key)
        same, goes_on = found[1] + found[3], found[2] is not None or found[0].children
        branch = same // self._block_bytes if goes_on and same < len(key) else 0
        while self._pools:
            node, covered, child, inside = found
            count = accepted = (covered + inside) // self._block_bytes
            end, behind = (node, len(node.blocks)) if child is None else (child, inside // self._block_bytes)
            further = []
            for number, pool in enumerate(self._pools):
                blocks = _last(end, behind, number, min(count, pool.most_reused))
                if any(block.number < 0 for block in blocks):  # a position lacks its block
                    accepted = min(accepted, pool.accepted(_backwards(end, behind, number), count))
                further.append(blocks)
            if accepted == count:
                return found, further, branch
            found = self._descend(root, key[: accepted * self._block_bytes])
        return found, (), branch

    def _descend(self, node: Node, key: bytes) -> _Found:
        """Follow `key` from the end of `node`."""
        size = self._block_bytes
        at = 0
        while (child := node.children.get(key[at : at + size])) is not None:
            if not key.startswith(child.key, at):
                return node, at, child, common_bytes(child.key, key, at, size)
            node = child
            at += len(child.key)
        return node, at, None, 0

    def _split(self, node: Node, at: int) -> Node:
        """Split `node` after `at` bytes. `node` becomes the lower part, as locks refer to its end. Return the upper part."""
        size = self._block_bytes
        assert node.parent is not None, "a root has no run to split"
        count = at // size
        further = [run[:count] for run in node.further]
        upper = Node(node.parent, node.key[:at], node.blocks[:count], further, self._tick())
        upper.locks = 1 if node.locks else 0
        upper.owners = set(node.owners)
        upper.children[bytes(node.key[at : at + size])] = node
        node.parent.children[bytes(node.key[:size])] = upper
        node.parent = upper
        del node.key[:at]
        del node.blocks[:count]
        for run in node.further:
            del run[:count]
        return upper

    def _fill(self, node: Node, further: Sequence[Sequence[GroupBlock]]) -> None:
        """Cache blocks of further groups, those of the positions that end with `node`, where there are none."""
        end, at = len(further[0]), node
        while end:
            first = end - len(at.blocks)
            for pool, blocks, run in zip(self._pools, at.further, further, strict=True):
                pool.cache(blocks, run[max(first, 0) : end], max(-first, 0))
            assert first <= 0 or at.parent is not None, "the run is on the path to the node"
            end, at = max(first, 0), at.parent or at

    def _append(self, node: Node, key: bytes, blocks: Sequence[int], owner: str) -> Node:
        """Add a run that shares no block with a child of `node`, and move the caller's lock to its end."""
        self.cached_blocks += len(blocks)
        self._record(node, key, blocks)
        if node.parent is not None and not node.children and node.locks == 1 and node.owners <= {owner}:
            # The caller holds the only lock, so the node can grow: the blocks of one request stay one node.
            node.key += key
            node.blocks += blocks
            return node
        child = Node(node, bytearray(key), list(blocks), [[] for _ in self._pools], self._tick())
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
            self.evictable_blocks -= len(at.blocks)
            if not at.children:
                self._leaves.discard(at)
            at = at.parent

    def _became_free_leaf(self, node: Node) -> None:
        if node.parent is None:
            # Forget empty salts: clients can make up any number of them.
            del self._roots[node.salt]
        else:
            self._leaves.put(node)

    def _detach(self, leaf: Node) -> None:
        """Remove an unlocked leaf. Its parent may become an evictable leaf."""
        parent = leaf.parent
        assert parent is not None, "a root is not a leaf"
        self._leaves.discard(leaf)
        del parent.children[bytes(leaf.key[: self._block_bytes])]
        parent.last_used = max(parent.last_used, leaf.last_used)
        if not parent.children and not parent.locks:
            self._became_free_leaf(parent)


def _last(node: Node, behind: int, group: int, count: int) -> list[GroupBlock]:
    """Return the last `count` blocks of a further group on the path to position `behind` of `node`."""
    blocks = node.further[group][max(0, behind - count) : behind]
    while (missing := count - len(blocks)) > 0:
        assert node.parent is not None, "the path has so many blocks"
        node = node.parent
        blocks = node.further[group][-missing:] + blocks
    return blocks


def _backwards(node: Node, behind: int, group: int) -> Iterator[GroupBlock]:
    """Iterate over the blocks of a further group from position `behind` of `node` to the root."""
    at: Node | None = node
    run = node.further[group][:behind]
    while at is not None:
        yield from reversed(run)
        at = at.parent
        run = at.further[group] if at is not None else []


def _by_last_use(leaf: Node) -> Key:
    return leaf.last_used, leaf.created
