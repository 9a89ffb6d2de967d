"""HostCache: the prefixes that lie in the memory of a host. All replicas of the host share them, and they outlive replicas.

To its places a prefix is the same: a host cache has a prefix tree and pools of groups as a replica has, over the host's blocks, and
each evicts by the same order. A prefix enters when a report shows that it was stored; a replica loads it for a sequence: see
`copies`. A block has a tag, the number of its store, so that no load takes another one for it.
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count

from text_generation_router.scheduling.messages import ReplicaSpec
from text_generation_router.scheduling.prefix_node import Node
from text_generation_router.scheduling.prefix_tree import PrefixTree
from text_generation_router.scheduling.sequence import ScheduledSequence
from text_generation_router.scheduling.state_pool import StatePool
from text_generation_router.scheduling.window_pool import WindowPool


class HostCache:
    """The blocks of one host."""

    def __init__(self, spec: ReplicaSpec, counts: Counter[str]) -> None:
        self.counts = counts
        self.groups = spec.host_groups
        first, *further = self.groups
        self.pools = tuple((StatePool if group.is_state else WindowPool)(group, spec.block_size) for group in further)
        self.tree = PrefixTree(spec.block_size, self.pools)
        self.moving: set[ScheduledSequence] = set()
        """Queued sequences whose blocks are being stored, so that they go on at another replica."""
        self.unfinished: dict[int, list[partial[None]]] = {}
        """The ends of the last stores of lost replicas."""
        self._free = list(range(first.num_blocks - 1, -1, -1))
        self._tags = [array("I", bytes(4 * group.num_blocks)) for group in self.groups]
        # Not from 1: a store of a router before may end late.
        self._numbers = count(secrets.randbits(32))

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
        """Return the tags of blocks; `new`: give them new ones, as they are stored."""
        if new:
            for block in blocks:
                self._tags[group][block] = next(self._numbers) & 0xFFFFFFFF
        return tuple([self._tags[group][block] for block in blocks])

    def finish(self, replica: int) -> None:
        """Give back the blocks of the last stores of a lost replica: nothing writes them any more."""
        for end in self.unfinished.pop(replica, ()):
            end()

    def forget(self, node: Node, count: int) -> None:
        """Forget the last `count` blocks of the path to `node`, and what needs them, but those in use."""
        while count > len(node.blocks):
            count -= len(node.blocks)
            assert node.parent is not None, "the path has so many blocks"
            node = node.parent
        self.give(self.tree.cut(node, len(node.blocks) - count))


class HostCaches:
    """The host caches of all replicas, by name."""

    def __init__(self) -> None:
        self._counts = Counter({"stored": 0, "loaded": 0, "failed": 0})
        """Blocks of all groups so far."""
        self._caches: dict[str, HostCache] = {}
        self._names: dict[int, str] = {}
        """The name of the cache of each replica that has one, serving or lost."""

    def __iter__(self) -> Iterator[HostCache]:
        return iter(self._caches.values())

    @property
    def figures(self) -> Mapping[str, int]:
        """Blocks stored, loaded, and failed so far, of all groups; blocks of the first group, and those of them in use."""
        blocks = sum(each.groups[0].num_blocks for each in self)
        return self._counts | {"blocks": blocks, "used": blocks - sum(each.free for each in self)}

    def of(self, replica: int, spec: ReplicaSpec) -> HostCache | None:
        """Return the host cache of a replica that joins; None if it has none."""
        if self._names.get(replica, "") != spec.host_cache:
            self.removed(replica)
        if not spec.host_cache:
            return None
        self._names[replica] = spec.host_cache
        if (cache := self._caches.get(spec.host_cache)) is None:
            cache = self._caches[spec.host_cache] = HostCache(spec, self._counts)
        cache.finish(replica)
        return cache if cache.groups == spec.host_groups else None

    def removed(self, replica: int) -> None:
        """Forget a replica, and a cache that no other has."""
        name = self._names.pop(replica, None)
        if name is not None:
            self._caches[name].finish(replica)
            if name not in self._names.values():
                del self._caches[name]
