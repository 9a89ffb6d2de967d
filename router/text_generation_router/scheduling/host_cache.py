"""HostCache: the prefixes that lie in the memory of a host. All replicas of the host share them, and they outlive replicas.

To its places a prefix is the same: a host cache has a prefix tree and pools of groups as a replica has, over the host's blocks, and
each evicts by the same order. A prefix enters when a report shows that it was stored; a replica loads it for a sequence: see
`copies`. A block has a tag, the number of its store, so that no load takes another one for it.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

from text_generation_router.scheduling.messages import ReplicaSpec
from text_generation_router.scheduling.prefix_node import Node
from text_generation_router.scheduling.prefix_tree import PrefixTree
from text_generation_router.scheduling.sequence import ScheduledSequence
from text_generation_router.scheduling.state_pool import StatePool
from text_generation_router.scheduling.window_pool import WindowPool


class HostCache:
    def __init__(self, spec: ReplicaSpec, counts: Counter[str], stores: Iterator[int]) -> None:
        """`stores` gives the number of each store."""
        self.counts = counts
        self.contents = spec.host_cache, spec.host_groups
        self.groups = spec.host_groups
        first, *further = self.groups
        self.pools = tuple((StatePool if group.is_state else WindowPool)(group, spec.block_size) for group in further)
        self.tree = PrefixTree(spec.block_size, self.pools)
        self.moving: set[ScheduledSequence] = set()
        """Queued sequences whose blocks are being stored, so that they go on at another replica."""
        self._free = list(range(first.num_blocks - 1, -1, -1))
        self._tags = [array("I", bytes(4 * group.num_blocks)) for group in self.groups]
        self._stores = stores

    @property
    def available(self) -> int:
        """Blocks of the first group that can be taken: free and evictable ones."""
        return len(self._free) + self.tree.evictable_blocks

    @property
    def free(self) -> int:
        """Blocks of the first group that hold nothing."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take blocks of the first group, evicting others if needed. They must be available."""
        if (missing := count - len(self._free)) > 0:
            self._free += self.tree.evict(missing)
        return [self._free.pop() for _ in range(count)]

    def give(self, blocks: Iterable[int]) -> None:
        """Free blocks of the first group."""
        self._free += blocks

    def tags(self, group: int, blocks: Sequence[int], *, new: bool) -> tuple[int, ...]:
        """Return the tags of blocks; `new`: give them a new one, as they are stored."""
        tags = self._tags[group]
        if not new:
            return tuple([tags[block] for block in blocks])
        tag = next(self._stores) & 0xFFFFFFFF
        for block in blocks:
            tags[block] = tag
        return (tag,) * len(blocks)

    def forget(self, node: Node, count: int) -> None:
        """Forget the last `count` blocks of the path to `node`, and what needs them, but those in use."""
        while count > len(node.blocks):
            count -= len(node.blocks)
            assert node.parent is not None, "the path has so many blocks"
            node = node.parent
        self.give(self.tree.cut(node, len(node.blocks) - count))


class HostCaches:
    """The host caches of all replicas, by memory: a memory holds the contents of one model."""

    def __init__(self, first_store: int) -> None:
        self._stores = count(first_store)
        self._counts = Counter({"stored": 0, "loaded": 0, "failed": 0})
        """Blocks of all groups so far."""
        self._caches: dict[str, HostCache] = {}
        self._used: dict[int, HostCache] = {}
        """The cache of each replica that has one, serving or lost."""

    def __iter__(self) -> Iterator[HostCache]:
        return iter(self._caches.values())

    @property
    def figures(self) -> Mapping[str, int]:
        """Blocks stored, loaded, and failed so far, of all groups; blocks of the first group, and those of them in use."""
        blocks = sum(each.groups[0].num_blocks for each in self)
        return self._counts | {"blocks": blocks, "used": blocks - sum(each.free for each in self)}

    def of(self, replica: int, spec: ReplicaSpec, serving: Collection[HostCache | None]) -> HostCache | None:
        """Return the host cache of a replica that joins; None if it has none, or `serving` ones use its memory for other contents."""
        self._used.pop(replica, None)
        memory = spec.host_cache.partition("/")[0]
        cache, contents = self._caches.get(memory), (spec.host_cache, spec.host_groups)
        if memory and (cache is None or (cache.contents != contents and cache not in serving)):
            cache = self._caches[memory] = HostCache(spec, self._counts, self._stores)
        if cache is not None and cache.contents == contents:
            self._used[replica] = cache
        self._forget_unused()
        return self._used.get(replica)

    def removed(self, replica: int) -> None:
        """Forget a replica, and a cache that no other has."""
        self._used.pop(replica, None)
        self._forget_unused()

    def _forget_unused(self) -> None:
        used = self._used.values()
        self._caches = {memory: cache for memory, cache in self._caches.items() if cache in used}
