"""ReplicaCopies: the copies between a replica and the host cache: loads for its new sequences, stores of what it has computed.

A sequence whose prefix is on the host is placed with blocks of its own for what its device lacks, and its load is ordered at once. It
waits until a report shows the end of the load; others run. Its blocks then enter the tree of the replica, as if they were computed.

The prefix of a sequence is stored, if it is worth it, when its prompt is computed and again when it ends. Stores are made one after
another, those of sequences that move at once, each of a bounded number of blocks, from the beginning of the prefix. A store guards the
path on the device, so none of an ended sequence begins while blocks are scarce; a running one guards its path anyway. A store names
the blocks of the first group that the host lacks, and those of the further groups with which a request could continue at one of the
`ends`: those of the turn, that of the answer.

So a block is there when its device evicts it or dies. While the host has free blocks, each prefix is stored. Once a store evicts
another one, only prefixes of sessions are: those of a job that a client names or that an earlier prompt began, and those that continue
a cached prefix.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count

from text_generation_proto.copies import CopiedBlocks, Copy, CopyEnd
from text_generation_router.scheduling.checkpoints import turn_blocks
from text_generation_router.scheduling.chunking import MIN_SHARED_TOKENS
from text_generation_router.scheduling.host_cache import HostCache
from text_generation_router.scheduling.jobs import own_job
from text_generation_router.scheduling.keys import TOKEN_BYTES
from text_generation_router.scheduling.kv_cache import KVCache
from text_generation_router.scheduling.prefix_node import Node, Prefix
from text_generation_router.scheduling.sequence import ScheduledSequence, State
from text_generation_router.scheduling.window_pool import NO_BLOCK, GroupBlock, HeldBlocks, number_of

MIN_LOADED_TOKENS = MIN_SHARED_TOKENS
"""Tokens by which a prefix on the host is longer than that on the device, so that it is loaded; fewer are computed, unless the
sequence went on elsewhere before."""
MOST_WAITING = 256
"""Prefixes that wait for their store; the oldest are dropped, but those of sequences that move."""
MOST_STORED = 512
"""Blocks of the first group in a store, and an eighth of those of the device at most."""


@dataclass(slots=True, eq=False)
class WaitingPrefix:
    salt: str
    key: bytes
    tenant: str
    ends: Set[int]
    """The blocks before each position where a request may continue."""
    moved: ScheduledSequence | None
    """The sequence that goes on elsewhere after the store."""


@dataclass(slots=True, eq=False)
class PrefixLoad:
    sequence: ScheduledSequence
    prefix: Prefix
    """That on the host."""
    node: Node
    """Its locked node there."""
    copy: Copy


@dataclass(slots=True, eq=False)
class PrefixStore:
    waiting: WaitingPrefix
    device: Node
    """The locked node at its end on the device."""
    sources: list[list[GroupBlock]]
    """The blocks of the further groups there."""
    host: Node
    """The locked node at which the run begins on the host."""
    known: Node
    """That up to which the host has blocks of the first group: the same one, or another below it."""
    key: bytes
    blocks: list[int]
    """The blocks of the run on the host; all but the last `new` are in its tree."""
    new: int
    further: list[list[GroupBlock]]
    """Likewise those of the further groups; NO_BLOCK where none is stored."""
    ends: bool
    """It is the last one of the prefix."""


class ReplicaCopies:
    """The copies of one replica; none without a host cache."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._block_bytes = cache.block_size * TOKEN_BYTES
        self._most_stored = max(1, min(MOST_STORED, cache.num_blocks // 8))
        self._numbers = count(1)
        self.moving: set[ScheduledSequence] = set()
        """Sequences that are to be stored as they leave."""
        self.stored: list[ScheduledSequence] = []
        """Running sequences that were to be stored before they leave, and are."""
        self._waiting: deque[WaitingPrefix] = deque()
        self._loads: dict[int, PrefixLoad] = {}
        self._stores: dict[int, PrefixStore] = {}
        self._ordered: list[Copy] = []
        """Loads that were not sent."""

    @property
    def _host(self) -> HostCache:
        """The host cache, where there is one."""
        assert self._cache.host is not None
        return self._cache.host

    @property
    def may_have_orders(self) -> bool:
        return bool(self._ordered) or next(self._due(), None) is not None

    @property
    def is_storing(self) -> bool:
        return bool(self._stores)

    @property
    def loading(self) -> Iterator[ScheduledSequence]:
        """The sequences that wait for their loads, or waited when they were cancelled."""
        return (load.sequence for load in self._loads.values())

    def orders(self, spare: int) -> tuple[Copy, ...]:
        """Return the copies to begin. Stores leave `spare` blocks of the device available, except those of sequences that run or move."""
        ordered, self._ordered = self._ordered, []
        for waiting in self._due():
            on_device = self._cache.tree.match(waiting.salt, waiting.key)
            # A lock makes the blocks of an ended sequence unavailable. One that moves had them until now.
            evictable = 0 if waiting.moved is not None else on_device.evictable_blocks
            if evictable and self._cache.available - spare < evictable:
                continue
            if (copy := self._begin_store(waiting, on_device)) is not None:
                ordered.append(copy)
            else:
                self._drop(waiting)
        return tuple(ordered)

    def _due(self) -> Iterator[WaitingPrefix]:
        """Yield the prefixes whose next store may begin: of sequences that move, else one at a time."""
        for waiting in [*self._waiting]:
            if waiting.moved is None and any(each.waiting.moved is None for each in self._stores.values()):
                return
            under_way = [store.waiting for store in self._stores.values()]
            # One under way may have the beginning of a prefix.
            if not any(each.salt == waiting.salt and waiting.key.startswith(each.key) for each in under_way):
                yield waiting

    def ended(self, end: CopyEnd) -> ScheduledSequence | None:
        """Record the end of a copy. Return the sequence whose load it was: `loading` no more, unless that failed."""
        if (load := self._loads.pop(end.number, None)) is not None:
            self._end_load(load, end.failed)
            return load.sequence
        if (store := self._stores.pop(end.number, None)) is not None:
            self._end_store(store, failed=bool(end.failed))
            # One of the further groups alone was the last, of all that the device has: they may not have room for all of its ends.
            if end.failed or store.ends or not store.new:
                self._drop(store.waiting)
        return None

    def close(self) -> None:
        """Give the host's blocks back: the replica is lost."""
        for load in self._loads.values():
            self._release(load)
        for waiting in list(self._waiting):
            self._drop(waiting)
        for store in self._stores.values():
            self._end_store(store, failed=True)

    # ----------------------------------------------------------------------------------------------------------- loads

    def find(self, sequence: ScheduledSequence) -> tuple[Prefix, Prefix | None]:
        """Return the cached prefix of `sequence`; where the host has a longer one, the part on the device, and that one."""
        cache, size, key = self._cache, self._cache.block_size, self._cache.reusable_key(sequence)
        prefix = cache.tree.find(sequence.salt, key)
        if (host := cache.host_of(sequence)) is None or sequence.load_failed:
            return prefix, None
        tree = host.tree
        # There are states for the checkpoint and for its own.
        has_states = cache.states is None or cache.states.available > 1
        least = size if sequence.requeued else MIN_LOADED_TOKENS
        most = tree.match(sequence.salt, key).blocks  # usually no more, and found at once
        if (most - prefix.blocks) * size < least or not has_states:
            return prefix, None
        found = tree.find(sequence.salt, key)
        if (found.blocks - prefix.blocks) * size < least:
            return prefix, None
        # What is loaded of the other groups enters the device's tree with blocks of the first one.
        firsts = (pool.group.first_block(found.blocks * size, size) for pool in cache.further_pools)
        kept = min([found.blocks, *firsts])
        return cache.tree.match(sequence.salt, key[: kept * self._block_bytes]), found

    def load(self, sequence: ScheduledSequence, found: Prefix) -> None:
        """Order the load of a prefix for `sequence`, which has the blocks for it."""
        host, first, end = self._host, sequence.committed_blocks, found.blocks
        node, blocks = host.tree.lock(found)
        groups = [_copied(host, 0, sequence.blocks[first:end], blocks[first:end], new=False)]
        own = [held.blocks[: end - held.first] for held in sequence.further]
        if sequence.states is not None:
            own.append(list(sequence.states.source))
        for number, (to, source) in enumerate(zip(own, found.further, strict=True), 1):
            host.pools[number - 1].keep(source)
            for block in source:
                block.uses += 1
            groups.append(_copied(host, number, _numbers(to), _numbers(source), new=False))
        copy = Copy(next(self._numbers), is_load=True, groups=tuple(groups))
        self._loads[copy.number] = PrefixLoad(sequence, found, node, copy)
        self._ordered.append(copy)
        tenant = sequence.request.qos.tenant
        known = host.tree.known_blocks(node, tenant) * self._cache.block_size
        sequence.own_cached_tokens = max(sequence.own_cached_tokens, known)
        host.tree.claim(node, tenant)
        sequence.loading = True
        sequence.num_computed_tokens = first * self._cache.block_size
        sequence.num_scheduled_tokens = sequence.prefill_length

    def _end_load(self, load: PrefixLoad, failed: Sequence[int]) -> None:
        sequence, host = load.sequence, self._host
        self._release(load)
        if failed:
            # A wrong checksum says that something else may be wrong: no block of this load is used again.
            host.counts["failed"] += len(failed)
            sequence.load_failed = True
            for pool, blocks in zip(host.pools, load.prefix.further, strict=True):
                pool.lose(blocks)
            if loaded := len(load.copy.groups[0].host):
                host.forget(load.node, loaded)
            return
        host.counts["loaded"] += load.copy.num_blocks
        if sequence.state is not State.PLACED:  # it was cancelled
            return
        if (states := sequence.states) is not None:
            # The checkpoint enters the tree with its position, as one that the sequence left there.
            (states.kept[load.prefix.blocks - 1],) = states.source
        self._cache.commit(sequence, sequence.cached_tokens)
        if states is not None:
            states.kept.clear()
        sequence.loading, sequence.loaded = False, True

    def _release(self, load: PrefixLoad) -> None:
        self._host.tree.release(load.node)
        for pool, blocks in zip(self._host.pools, load.prefix.further, strict=True):
            pool.release(blocks)

    # ---------------------------------------------------------------------------------------------------------- stores

    def keep(self, sequence: ScheduledSequence) -> None:
        """Let the computed prefix of a sequence be stored, if that is worth it."""
        cache, count = self._cache, sequence.committed_blocks
        is_moving = sequence in self.moving
        if cache.host_of(sequence) is None or not (cache.caching and count):
            return
        if not is_moving and not worth_storing(sequence, has_room=self._host.free >= count):
            return
        self.store(sequence, moves=is_moving and sequence.state is State.PREEMPTED)

    def store(self, sequence: ScheduledSequence, *, moves: bool) -> None:
        """Let the prefix of a sequence be stored. One that `moves` goes on elsewhere then: at once if the host has all of it."""
        cache, request, count = self._cache, sequence.request, sequence.committed_blocks
        ends = turn_blocks(request.turn_ends, len(request.prompt), cache.block_size) | {count}
        key = sequence.key[: count * self._block_bytes]
        waiting = WaitingPrefix(sequence.salt, key, request.qos.tenant, ends, sequence if moves else None)
        if moves and sequence.state is State.PREEMPTED:
            if not self._host.pools and self._host.tree.match(sequence.salt, key).blocks == count:
                return
            self._host.moving.add(sequence)
        (self._waiting.appendleft if moves else self._waiting.append)(waiting)
        if len(self._waiting) > MOST_WAITING:
            stored = [store.waiting for store in self._stores.values()]
            others = (each for each in self._waiting if each.moved is None and each not in stored)
            if (oldest := next(others, None)) is not None:
                self._drop(oldest)

    def _begin_store(self, waiting: WaitingPrefix, on_device: Prefix) -> Copy | None:
        """Return the next store of a prefix; None if nothing is left to store, or there is no room for it."""
        cache, host, size = self._cache, self._host, self._block_bytes
        known = host.tree.match(waiting.salt, waiting.key)
        end = min(on_device.blocks, known.blocks + self._most_stored)
        if end == 0 or end < known.blocks:
            return None
        if end < on_device.blocks:
            on_device = cache.tree.match(waiting.salt, waiting.key[: end * size])
        wanted = self._wanted(waiting, on_device, known) if host.pools else []
        first = min([known.blocks, *(position for positions in wanted for position in positions)])
        known_lock, on_host = host.tree.lock(known)
        if (new := min(end - known.blocks, host.available)) < end - known.blocks:
            # Only whole prefixes of what fits: the further groups are left to a later store.
            end, wanted, first = known.blocks + new, [{} for _ in host.pools], known.blocks
            on_device = cache.tree.match(waiting.salt, waiting.key[: end * size])
        if not new and not any(wanted):
            host.tree.release(known_lock)
            return None
        lock, on_path = cache.tree.lock(on_device)
        taken = host.take(new)
        groups = [_copied(host, 0, on_path[known.blocks :], taken, new=True)]
        further = []
        for number, (positions, pool) in enumerate(zip(wanted, host.pools, strict=True), 1):
            cache.further_pools[number - 1].keep(positions.values())
            held = HeldBlocks()
            pool.extend(held, len(positions))
            run = [NO_BLOCK] * (end - first)
            for position, block in zip(positions, held.blocks, strict=True):
                run[position - first] = block
            if pool.group.is_state:
                for source, block in zip(positions.values(), held.blocks, strict=True):
                    block.position, block.uses = source.position, source.uses
            further.append(run)
            groups.append(_copied(host, number, _numbers(positions.values()), _numbers(held.blocks), new=True))
        base = known_lock
        if first < known.blocks:
            base, _ = host.tree.lock(host.tree.match(waiting.salt, waiting.key[: first * size]))
        number = next(self._numbers)
        self._stores[number] = PrefixStore(
            waiting,
            lock,
            [list(positions.values()) for positions in wanted],
            base,
            known_lock,
            waiting.key[first * size : end * size],
            on_host[first:] + taken,
            new,
            further,
            ends=end * size == len(waiting.key),
        )
        return Copy(number, is_load=False, groups=tuple(groups))

    def _drop(self, waiting: WaitingPrefix) -> None:
        """Store nothing more of a prefix."""
        self._waiting.remove(waiting)
        if waiting.moved is not None:
            self._host.moving.discard(waiting.moved)
            if waiting.moved.state is State.RUNNING:
                self.stored.append(waiting.moved)

    def _wanted(self, waiting: WaitingPrefix, on_device: Prefix, known: Prefix) -> list[dict[int, GroupBlock]]:
        """Return the blocks of the further groups to store of a prefix on the device, by position; {} where there is no room."""
        size, end = self._cache.block_size, on_device.blocks
        wanted = []
        for number, pool in enumerate(self._host.pools):
            group, ends = pool.group, (at for at in waiting.ends if at <= end)
            needed = set[int]().union(*(range(group.first_block(at * size, size), at) for at in ends))
            first = min(known.blocks, min(needed, default=end))
            run = self._cache.tree.further(on_device, number, end - first)
            if group.is_state:
                needed |= {position for position, block in enumerate(run, first) if block.uses}
            if known.blocks > first:
                stored = self._host.tree.further(known, number, known.blocks - first)
                needed -= {position for position, block in enumerate(stored, first) if block.number >= 0}
            lacking = {position: run[position - first] for position in needed if run[position - first].number >= 0}
            wanted.append(lacking if len(lacking) <= pool.available else {})
        return wanted

    def _end_store(self, store: PrefixStore, *, failed: bool) -> None:
        cache, host = self._cache, self._host
        cache.tree.release(store.device)
        for pool, blocks in zip(cache.further_pools, store.sources, strict=True):
            pool.release(blocks)
        unused, end = store.blocks[-store.new :] if store.new else [], store.host
        if not failed:
            further = store.further if host.pools else ()
            end, present = host.tree.extend(store.host, store.key, store.blocks, store.waiting.tenant, further)
            unused = unused[: max(0, present - (len(store.blocks) - store.new))]
            host.tree.claim(end, store.waiting.tenant)
            host.counts["stored"] += store.new + sum(map(len, store.sources))
        host.give(unused)
        for pool, run in zip(host.pools, store.further, strict=True):
            pool.release([block for block in run if block is not NO_BLOCK])
        if store.known is not store.host:
            host.tree.release(store.known)
        host.tree.release(end)


def worth_storing(sequence: ScheduledSequence, *, has_room: bool) -> bool:
    """Return True if the prefix of a sequence is worth storing; `has_room`: nothing is evicted for it."""
    is_session = sequence.job not in ("", own_job(sequence))
    return has_room or is_session or sequence.cached_tokens >= MIN_SHARED_TOKENS


def _copied(host: HostCache, group: int, device: Sequence[int], blocks: Sequence[int], *, new: bool) -> CopiedBlocks:
    return CopiedBlocks(tuple(device), tuple(blocks), host.tags(group, blocks, new=new))


def _numbers(blocks: Iterable[GroupBlock]) -> list[int]:
    return list(map(number_of, blocks))
