"""Checks of a whole scheduler: of its public interface, and of its parts against each other."""

from __future__ import annotations

from collections import Counter

from text_generation_router.scheduling.copies import ReplicaCopies
from text_generation_router.scheduling.host_cache import HostCache
from text_generation_router.scheduling.kv_cache import KVCache
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.sequence import ScheduledSequence, State
from text_generation_router.scheduling.window_pool import NO_BLOCK, HeldBlocks


def assert_idle(scheduler: Scheduler) -> None:
    """Assert that no request is left in the queue, in a tenant's account or on a replica."""
    check_scheduler(scheduler)
    stats = scheduler.stats()
    assert (stats.waiting, stats.queued_tokens, stats.running, stats.promised_tokens, stats.kv_usage) == (0,) * 5
    assert not scheduler.requests
    assert scheduler.next_expiry is None
    for replica in scheduler.replicas.values():
        if replica is not None:
            assert (replica.work, replica.prompts.unscheduled, replica.prompts.uncomputed) == (0, 0, 0)


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that the state is consistent: blocks, slots, locks, budgets, queue, accounts."""
    assert set(scheduler.queue) == {each for each in scheduler._sequences.values() if each.state is State.WAITING}
    on_replicas = sum(replica.occupied_slots for replica in scheduler.serving)
    waiting = len(scheduler.queue) + on_replicas
    assert len(scheduler._sequences) + len(scheduler.replays) == waiting, "each waits or has one slot"
    scheduler._dispatcher.check_invariants()
    scheduler.queue.check_invariants()
    for replica in scheduler.serving:
        check_replica(replica)
    for host in scheduler.host_caches:
        check_host(host, [replica.copies for replica in scheduler.serving if replica.cache.host is host])


def check_replica(replica: ReplicaScheduler) -> None:
    """Assert that slots, blocks, prompts and counters agree with the sequences."""
    held = {each for each in replica._slots if each is not None}
    placed, running = ({each for each in held if each.state is state} for state in (State.PLACED, State.RUNNING))
    assert (placed, running) == (set(replica._placed.values()), set(replica._running.values()))
    assert len(running) + len(placed) <= replica._policy.max_batch_size
    assert sorted([each.slot for each in held] + replica._free_slots) == list(range(replica.spec.num_slots))
    assert all(replica._slots[each.slot] is each and each.replica == replica.replica for each in held)
    releasing = [each for each in (*replica._to_release, *replica._releasing) if each.slot >= 0]
    loading = set(replica.copies.loading)
    assert loading == {each for each in held if each.loading}
    assert Counter(releasing) == Counter(held - placed - running - loading), "a slot is released once"
    assert replica.work == sum(each.remaining_work for each in placed | running)
    assert all(each.remaining_work >= 0 for each in placed | running)
    assert replica.promised_tokens == sum(each.max_length + 1 for each in held)
    replica.prompts.check_invariants(placed | running)
    check_cache(replica.cache, held, replica.copies)


def check_cache(cache: KVCache, sequences: set[ScheduledSequence], copies: ReplicaCopies) -> None:
    """Assert that each block has one owner: free, tree, or one of `sequences`, all that have blocks."""
    store = copies._store
    owned = [*cache._free, *(block for node in cache.tree.nodes() for block in node.blocks)]
    locks = [sequence.prefix_lock for sequence in sequences if sequence.prefix_lock is not None]
    for sequence in sequences:
        assert sequence.prefix_lock is not None
        committed, path = sequence.committed_blocks, cache.tree.blocks_to(sequence.prefix_lock)
        owned += (*sequence.duplicate_blocks, *sequence.blocks[committed:])
        assert len(path) == committed
        assert {*path, *sequence.duplicate_blocks} >= set(sequence.blocks[:committed])
        computed = max(sequence.num_computed_tokens, sequence.num_kv_tokens)
        assert committed * cache.block_size <= computed, "only computed blocks are committed"
        blocks = min([len(sequence.blocks), *(held.end for held in sequence.further)])
        assert sequence.capacity == blocks * cache.block_size
    assert sorted(owned) == list(range(cache.num_blocks)), "each block has one owner"
    assert sequences >= set(cache._growing.values())
    assert all(each.capacity < min(each.max_length, each.length + cache.low_room) for each in cache._growing.values())
    cache.tree.check_invariants(locks + ([] if store is None else [store.device]))
    for number, pool in enumerate(cache.further_pools):
        cached = (block for node in cache.tree.nodes() for block in node.further[number])
        held = [list(each.further_held[number].blocks) for each in sequences]
        held += [] if store is None else [store.sources[number]]
        pool.check_invariants(cached, [HeldBlocks(0, len(blocks), blocks) for blocks in held])
        for sequence in sequences if number < len(cache.pools) else ():
            needed = pool.group.first_block(sequence.num_kv_tokens, cache.block_size)
            assert sequence.loading or sequence.further[number].first <= needed


def check_host(host: HostCache, copies: list[ReplicaCopies]) -> None:
    """Assert that each block of a host has one owner: free, tree, or a store under way; `copies` are those of its replicas."""
    stores = [each._store for each in copies if each._store is not None]
    loads = [load for each in copies for load in each._loads.values()]
    owned = [*host._free, *(block for node in host.tree.nodes() for block in node.blocks)]
    owned += [block for store in stores for block in store.blocks[len(store.blocks) - store.new :]]
    assert sorted(owned) == list(range(host.groups[0].num_blocks)), "each block has one owner"
    locks = [node for store in stores for node in {store.host, store.known}]
    host.tree.check_invariants(locks + [load.node for load in loads])
    for number, pool in enumerate(host.pools):
        cached = (block for node in host.tree.nodes() for block in node.further[number])
        held = [[block for block in store.further[number] if block is not NO_BLOCK] for store in stores]
        held += [load.prefix.further[number] for load in loads]
        pool.check_invariants(cached, [HeldBlocks(0, len(blocks), blocks) for blocks in held])
