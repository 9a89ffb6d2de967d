"""HostLedger: the contents of the blocks of a host, and the copies of one engine without a model.

A copy is as bad as it may be: from its begin its target holds nothing, and its source is read when it ends, some steps later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from text_generation_proto.copies import Copy, CopyEnd

STEPS = (0, 3, 1)
"""Further steps that a copy takes, by its number."""


class Ledger(Protocol):
    """The blocks of a group on a device."""

    def read(self, block: int) -> object: ...

    def write(self, block: int, content: object) -> None: ...


class HostBlocks:
    """The blocks of a host: (tag, content) by group and number. Engines share them."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        """Blocks of each group."""
        self.contents: dict[tuple[int, int], tuple[int, object]] = {}
        self.writing: set[tuple[int, int]] = set()
        """The blocks of stores under way, also of engines whose stream broke. Another store of such a block fails."""

    def spoil(self, draw: Random) -> None:
        """Damage half of the blocks."""
        for block in sorted(self.contents):
            if draw.random() < 0.5:
                del self.contents[block]


@dataclass
class HostLedger:
    """The copies under way."""

    host: HostBlocks
    ledgers: Sequence[Ledger]
    _under_way: list[tuple[int, Copy]] = field(default_factory=list)
    _failed: set[int] = field(default_factory=set)
    """The stores under way that found one of their blocks locked."""

    def begin(self, copy: Copy) -> None:
        assert copy.number not in {each.number for _, each in self._under_way}
        assert copy.num_blocks
        self._under_way.append((STEPS[copy.number % len(STEPS)], copy))
        for group, (device, host, tags) in enumerate(copy.groups):
            assert len(device) == len(host) == len(tags)
            assert all(0 <= block < self.host.numbers[group] for block in host)
            for to in device if copy.is_load else ():
                self.ledgers[group].write(to, None)
        if not copy.is_load:
            stored = [(group, block) for group, columns in enumerate(copy.groups) for block in columns.host]
            if not self.host.writing.isdisjoint(stored):
                self._failed.add(copy.number)
                return
            self.host.writing |= set(stored)
            for each in stored:
                self.host.contents.pop(each, None)

    def ended(self) -> list[CopyEnd]:
        """End the copies whose time has come."""
        now = [copy for steps, copy in self._under_way if not steps]
        self._under_way = [(steps - 1, copy) for steps, copy in self._under_way if steps]
        return [CopyEnd(copy.number, self._end(copy)) for copy in now]

    def close(self) -> None:
        """End all copies late: some store their blocks, and others lose them."""
        for _, copy in self._under_way:
            if copy.number % 2 or copy.is_load:
                self._end(copy)
            elif copy.number not in self._failed:
                self.host.writing -= {(group, block) for group, each in enumerate(copy.groups) for block in each.host}
        self._under_way.clear()

    def _end(self, copy: Copy) -> tuple[int, ...]:
        if copy.number in self._failed:
            return tuple(range(copy.num_blocks))
        failed, index = [], -1
        for group, columns in enumerate(copy.groups):
            for device, host, tag in zip(*columns, strict=True):
                index += 1
                if not copy.is_load:
                    self.host.writing.remove((group, host))
                    self.host.contents[group, host] = tag, self.ledgers[group].read(device)
                    continue
                stored, content = self.host.contents.get((group, host), (None, None))
                if stored == tag:
                    self.ledgers[group].write(device, content)
                else:
                    failed.append(index)
        return tuple(failed)
