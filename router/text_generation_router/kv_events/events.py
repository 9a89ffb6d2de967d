"""KvEvents: the changes of all prefix trees of a scheduler as events of blocks, in vLLM's form.

    ["BlockStored", hashes, hash of the block before, token ids, block size, None, medium, name of the LoRA adapter]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

A gateway sees one server, whatever its replicas: a block is stored once the first of them has it, and removed once none has. The medium
is GPU for the devices of the replicas, CPU for host caches. The hash of a block is that of all tokens up to its end, of the adapter and
of the cache salt.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from text_generation_router.scheduling.prefix_node import Change, StoredBlocks
from text_generation_router.scheduling.prefix_tree import PrefixTree
from text_generation_router.scheduling.scheduler import Scheduler

Event = list[Any]


@dataclass(slots=True)
class _Place:
    """A tree, as far as its events were made."""

    medium: str
    block_size: int
    hashes: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    """The hash of each block, and its adapter."""


class KvEvents:
    """Makes the events of one scheduler."""

    def __init__(self) -> None:
        self._places: dict[PrefixTree, _Place] = {}
        self._holders = Counter[tuple[str, bytes]]()
        """The number of trees that have a block, by medium and hash."""
        self._began = False

    def collect(self, scheduler: Scheduler) -> list[Event]:
        """Return the events since the last call."""
        serving = {each.cache.tree: _Place("GPU", each.spec.block_size) for each in scheduler.serving}
        sizes = {each.cache.host: each.spec.block_size for each in scheduler.serving}
        hosts = {host.tree: _Place("CPU", sizes[host]) for host in scheduler.host_caches if host in sizes}
        events: list[Event] = [] if self._began else [["AllBlocksCleared"]]
        self._began = True
        for tree in [each for each in self._places if each not in serving and each not in hosts]:
            place = self._places.pop(tree)
            events += self._removed(place, list(place.hashes))
        for tree, place in (serving | hosts).items():
            if tree.changes is None or tree not in self._places:
                self._places[tree] = place
                tree.record()
            changes, tree.changes = tree.changes or [], []
            for change in changes:
                events += self._events(self._places[tree], change)
        return events

    def _events(self, place: _Place, change: Change) -> list[Event]:
        return self._stored(place, change) if isinstance(change, StoredBlocks) else self._removed(place, change)

    def _stored(self, place: _Place, run: StoredBlocks) -> list[Event]:
        if run.parent is None:
            before, adapter = blake2b(run.salt.encode(), digest_size=8).digest(), run.salt.partition("\0")[0]
        else:
            before, adapter = place.hashes[run.parent]
        parent, new, size = None if run.parent is None else before, list[bytes](), len(run.key) // len(run.blocks)
        for number, block in enumerate(run.blocks):
            before = blake2b(before + run.key[number * size : (number + 1) * size], digest_size=8).digest()
            place.hashes[block] = before, adapter
            self._holders[place.medium, before] += 1
            if self._holders[place.medium, before] == 1:
                new.append(before)
            else:  # another tree has it, and so all blocks before it
                parent = before
        if not new:
            return []
        tokens = array("I", run.key[-len(new) * size :]).tolist()
        above = None if parent is None else _number(parent)
        hashes = [_number(each) for each in new]
        return [["BlockStored", hashes, above, tokens, place.block_size, None, place.medium, adapter or None]]

    def _removed(self, place: _Place, blocks: list[int]) -> list[Event]:
        gone: list[int] = []
        for block in blocks:
            held = place.medium, place.hashes.pop(block)[0]
            self._holders[held] -= 1
            if not self._holders[held]:
                del self._holders[held]
                gone.append(_number(held[1]))
        return [["BlockRemoved", gone, place.medium]] if gone else []


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big")
