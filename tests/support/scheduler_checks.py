"""Checks of a whole scheduler: of its public interface, and of its parts against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

from text_generation_router.scheduling.chunking import _PREFIX_BYTES, PendingPrompts
from text_generation_router.scheduling.copies import ReplicaCopies
from text_generation_router.scheduling.dispatch import Dispatcher
from text_generation_router.scheduling.fairness import Tenants
from text_generation_router.scheduling.host_cache import HostCache
from text_generation_router.scheduling.kv_cache import KVCache
from text_generation_router.scheduling.prefix_node import Node
from text_generation_router.scheduling.prefix_tree import PrefixTree
from text_generation_router.scheduling.queue import FairQueue
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.sequence import ScheduledSequence, State
from text_generation_router.scheduling.window_pool import NO_BLOCK, GroupBlock, HeldBlocks, WindowPool


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
    assert len(scheduler._sequences) + (scheduler.replays.running is not None) == waiting, "each waits or has one slot"
    check_dispatcher(scheduler._dispatcher)
    check_queue(scheduler.queue)
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
    assert sorted([each.slot for each in held] + replica._free_slots) == list(replica.spec.slots)
    assert all(replica._slots[each.slot] is each and each.replica == replica.replica for each in held)
    releasing = [each for each in (*replica._to_release, *replica._releasing) if each.slot >= 0]
    loading = set(replica.copies.loading)
    assert replica.copies.moving <= held
    assert loading == {each for each in held if each.loading}
    assert Counter(releasing) == Counter(held - placed - running - loading), "a slot is released once"
    assert replica.work == sum(each.remaining_work for each in placed | running)
    assert all(each.remaining_work >= 0 for each in placed | running)
    assert replica.promised_tokens == sum(each.max_length + 1 for each in held)
    check_prompts(replica.prompts, placed | running)
    check_cache(replica.cache, held, replica.copies)


def check_cache(cache: KVCache, sequences: set[ScheduledSequence], copies: ReplicaCopies) -> None:
    """Assert that each block has one owner: free, tree, or one of `sequences`, all that have blocks."""
    stores = [*copies._stores.values()]
    owned = [*cache._free, *(block for node in nodes_of(cache.tree) for block in node.blocks)]
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
    check_tree(cache.tree, locks + [store.device for store in stores])
    for number, pool in enumerate(cache.further_pools):
        cached = (block for node in nodes_of(cache.tree) for block in node.further[number])
        held = [list(each.further_held[number].blocks) for each in sequences]
        held += [store.sources[number] for store in stores]
        check_pool(pool, cached, [HeldBlocks(0, len(blocks), blocks) for blocks in held])
        for sequence in sequences if number < len(cache.pools) else ():
            needed = pool.group.first_block(sequence.num_kv_tokens, cache.block_size)
            assert sequence.loading or sequence.further[number].first <= needed


def check_host(host: HostCache, copies: list[ReplicaCopies]) -> None:
    """Assert that each block of a host has one owner: free, tree, or a store under way; `copies` are those of its replicas."""
    stores = [store for each in copies for store in each._stores.values()]
    loads = [load for each in copies for load in each._loads.values()]
    owned = [*host._free, *(block for node in nodes_of(host.tree) for block in node.blocks)]
    owned += [block for store in stores for block in store.blocks[len(store.blocks) - store.new :]]
    assert sorted(owned) == list(range(host.groups[0].num_blocks)), "each block has one owner"
    locks = [node for store in stores for node in {store.host, store.known}]
    check_tree(host.tree, locks + [load.node for load in loads])
    for number, pool in enumerate(host.pools):
        cached = (block for node in nodes_of(host.tree) for block in node.further[number])
        held = [[block for block in store.further[number] if block is not NO_BLOCK] for store in stores]
        held += [load.prefix.further[number] for load in loads]
        check_pool(pool, cached, [HeldBlocks(0, len(blocks), blocks) for blocks in held])


def check_queue(queue: FairQueue) -> None:
    """Assert that counters, order and accounts agree with the queued sequences."""
    sequences = list(queue)
    check_accounts(queue.tenants, sequences)
    assert queue.work == sum(sequence.work for sequence in sequences)
    assert len(sequences) == sum(tenant.queued for tenant in queue.tenants)
    assert len(queue._requeued) == sum(sequence.requeued and not sequence.skipped for sequence in sequences)


def check_accounts(accounts: Tenants, queued: Sequence[ScheduledSequence]) -> None:
    """Assert that the accounts agree with the `queued` sequences."""
    for tenant in accounts:
        own = [each for each in queued if tenant.name == (each.job if tenant.is_job else each.request.qos.tenant)]
        waiting = [sequence for sequence in own if not sequence.requeued]
        assert (tenant.queued, tenant.waiting) == (len(own), len(waiting))
        assert tenant.work == sum(sequence.work for sequence in own)
        shown = [each for each in waiting if not each.skipped]
        assert len(tenant.line) == sum(tenant.is_job or not each.job for each in shown)
        assert (tenant.head is None) == (not shown)
        if tenant.jobs is not None:
            check_accounts(tenant.jobs, [each for each in own if each.job])
    assert accounts._active_weight == sum(tenant.weight for tenant in accounts if tenant.active)
    assert len(accounts.ready) == sum(tenant.head is not None for tenant in accounts)
    assert len(accounts._waiting) == sum(tenant.waiting > 0 for tenant in accounts)
    assert len(accounts._idle) == sum(not tenant.active for tenant in accounts)


def check_dispatcher(dispatcher: Dispatcher) -> None:
    """Assert that a sequence is skipped for a reason."""
    groups = (*dispatcher._skipped.values(), *dispatcher._without_adapter.values())
    reasoned = {each for group in groups for each in group}
    assert all(each in reasoned or not dispatcher.can_hold(each) for each in dispatcher._queue if each.skipped)


def check_prompts(prompts: PendingPrompts, sequences: Set[ScheduledSequence]) -> None:
    """Assert that the prompts agree with `sequences`, the placed and running ones."""
    pending = {each for each in sequences if each.num_computed_tokens < each.prefill_length}
    assert set(prompts._sequences.values()) == pending
    assert prompts.unscheduled == sum(each.unscheduled_tokens for each in sequences)
    assert prompts.uncomputed == sum(each.prefill_length - each.num_computed_tokens for each in sequences)
    indexed = [each for group in prompts._by_prefix.values() for _, _, each in group]
    assert set(indexed) == {each for each in pending if len(each.prompt_key) >= _PREFIX_BYTES}


def nodes_of(tree: PrefixTree) -> list[Node]:
    """Return all nodes, including the root of each salt."""
    found = list(tree._roots.values())
    for node in found:
        found += node.children.values()
    return found


def check_tree(tree: PrefixTree, locked: Sequence[Node]) -> None:
    """Assert that counters and locks agree with the nodes; `locked`: the nodes that callers hold."""
    nodes = nodes_of(tree)
    held = Counter(map(id, locked))
    for node in nodes:
        assert node.locks == held.pop(id(node), 0) + sum(child.locks > 0 for child in node.children.values())
        assert len(node.key) == len(node.blocks) * tree._block_bytes
        assert [len(run) for run in node.further] == [len(node.blocks)] * len(tree._pools)
        assert node.parent is not None or node.children or node.locks, "an unused root is forgotten"
        for first_block, child in node.children.items():
            assert child.parent is node
            assert child.owners <= node.owners
            assert child.blocks
            assert child.key.startswith(first_block)
    assert not held, "a lock is on a node of the tree"
    assert tree.cached_blocks == sum(len(node.blocks) for node in nodes)
    assert tree.evictable_blocks == sum(len(node.blocks) for node in nodes if not node.locks)
    assert len(tree._leaves) == sum(not node.children and not node.locks for node in nodes)


def check_pool(pool: WindowPool, cached: Iterable[GroupBlock], held: Sequence[HeldBlocks]) -> None:
    """Assert that each block has one owner; `cached`: those of the tree, `held`: those of all sequences."""
    in_tree = [block for block in cached if block.number >= 0]
    holders: dict[GroupBlock, int] = {}
    for each in held:
        assert each.end == each.first + len(each.blocks)
        for block in each.blocks:
            holders[block] = holders.get(block, 0) + 1
    assert all(block.holders == count and block.number >= 0 for block, count in holders.items())
    assert all(block.is_cached for block in in_tree)
    own = [block for block in holders if not block.is_cached]
    assert {*pool._behind, *pool._recent} == {block for block in in_tree if block not in holders}
    assert not pool._behind.keys() & pool._recent.keys()
    assert all(block.holders == 1 for block in (*pool._free, *own))
    numbers = [block.number for block in (*pool._free, *in_tree, *own)]
    assert sorted(numbers) == list(range(pool.group.num_blocks)), "each block has one owner"
    assert {block for block in holders if block.is_cached} <= set(in_tree)
