"""Recounts what a replica's batch holds – blocks, slots, tokens of work – from its entries and its prefix tree.

It looks into private parts on purpose: the sums that the core keeps up to date are to be those that counting gives.
"""

from __future__ import annotations

from collections.abc import Iterator

from text_generation_router.scheduling.batch import Batch
from text_generation_router.scheduling.entry import Entry, State
from text_generation_router.scheduling.prefix import WORTH_WAITING_FOR
from text_generation_router.scheduling.prefix_tree import Node, PrefixTree
from text_generation_router.scheduling.scheduler import Scheduler


def audit(batch: Batch) -> None:
    """Every block has one owner: nobody, the tree or one entry. Every counter is what counting gives."""
    entries = [entry for entry in batch._slots if entry is not None]
    _audit_blocks(batch, entries)
    _audit_slots(batch, entries)
    _audit_counters(batch, entries)


def audit_idle(scheduler: Scheduler) -> None:
    """Nothing is left of anybody: not in the queue, not with a tenant, not on a replica."""
    queue = scheduler._queue
    assert (scheduler.waiting, scheduler.running, scheduler.used_blocks) == (0, 0, 0)
    assert (len(queue), queue.work(), queue.next_expiry) == (0, 0, None)
    assert not any(tenant.active for tenant in queue._tenants._known.values())
    assert not queue._lines
    assert scheduler.next_expiry is None
    assert scheduler.requests == ()
    for batch in scheduler._replicas.serving:
        audit(batch)
        assert (batch.work, batch._prompts.unordered, batch._prompts.uncomputed, batch._context) == (0, 0, 0, 0)
        assert batch.cache.available == batch.spec.num_blocks
        assert not any(
            (batch._placed, batch._running, batch._prompts._computing, batch._prompts._to_order, batch._growth._hungry)
        )
        assert not any((batch._to_release, batch._releasing))


def nodes(tree: PrefixTree) -> Iterator[Node]:
    """Every node of the tree, the roots included."""
    stack = list(tree._roots.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def _audit_blocks(batch: Batch, entries: list[Entry]) -> None:
    pool, tree = batch.cache.pool, batch.cache.tree
    kept = [block for node in nodes(tree) for block in node.blocks]
    evictable = sum(len(node.blocks) for node in nodes(tree) if not node.locks)
    private = [block for entry in entries for block in (*entry.duplicates, *entry.blocks[entry.published :])]
    owned = [*pool._free, *kept, *private]
    assert len(owned) == pool.num_blocks, "blocks are lost or made up"
    assert set(owned) == set(range(pool.num_blocks)), "a block has two owners"
    assert (tree.cached_blocks, tree.evictable_blocks) == (len(kept), evictable)
    in_tree = set(kept)
    for entry in entries:
        assert len(entry.blocks) == len(set(entry.blocks)), "a block stands twice in a table"
        assert entry.capacity == len(entry.blocks) * pool.block_size
        shared = entry.blocks[: entry.published]
        assert set(shared) <= in_tree | set(entry.duplicates)
        assert entry.node is not None
        assert entry.node.locks > 0
        assert _depth(entry.node) == entry.published
        assert entry.published * pool.block_size <= max(entry.prefilled, entry.computed)


def _depth(node: Node) -> int:
    """Blocks from the root to the end of `node`."""
    depth = 0
    at: Node | None = node
    while at is not None:
        depth += len(at.blocks)
        at = at.parent
    return depth


def _audit_slots(batch: Batch, entries: list[Entry]) -> None:
    taken = {entry.slot for entry in entries}
    assert len(taken) == len(entries)
    assert sorted(taken | set(batch._free_slots)) == list(range(batch.spec.num_slots))
    assert len(taken) + len(batch._free_slots) == batch.spec.num_slots
    for entry in entries:
        assert batch._slots[entry.slot] is entry
        assert entry.replica == batch.replica
        assert entry.state is not State.WAITING
        releasing = entry in batch._to_release or entry in batch._releasing
        assert releasing == (entry.state in (State.PREEMPTED, State.CANCELLED))
        assert (entry.request.id in batch._placed) == (entry.state is State.PLACED)
        assert (entry.request.id in batch._running) == (entry.state is State.RUNNING)


def _audit_counters(batch: Batch, entries: list[Entry]) -> None:
    here = [entry for entry in entries if entry.state in (State.PLACED, State.RUNNING)]
    computing = [entry for entry in here if entry.prefilled < entry.prefill_length]
    assert batch.work == sum(entry.work_left for entry in here)
    assert batch._prompts.unordered == sum(entry.unordered for entry in here)
    assert batch._prompts.uncomputed == sum(entry.prefill_length - entry.prefilled for entry in here)
    assert batch._context == sum(entry.length for entry in here if entry not in computing)
    assert set(batch._prompts._computing) == {entry.request.id for entry in computing}
    assert batch.held == len(entries)
    long = [entry for entry in computing if len(entry.request.prompt) >= WORTH_WAITING_FOR]
    assert {id(one) for entry in long for one in batch._prompts._beginnings.alike(entry)} == {
        id(entry) for entry in long
    }
    assert len(batch._prompts._beginnings) == len(
        {(entry.salt, entry.request.prompt[:WORTH_WAITING_FOR]) for entry in long}
    )
