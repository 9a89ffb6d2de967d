"""The stage before the queue: tokenizing, chat templates and proofs of grammars, in turns between tenants.

Each kind of work has its own workers, threads or processes, and a `WorkerQueue` that decides who gets the next free one.
All queues share one `Preparation`: it bounds the characters that wait and counts those that each tenant was served.

The worker goes to the tenant that was served the fewest characters. Two rules keep a worker for those who come later:
long work never holds the last one, nor does one tenant once another was seen. A tenant that was idle enters with the
smallest count of the active ones: it saves nothing up, and is not made to pay for the use of an idle server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass

from text_generation_router.errors import CannotKeepUp, Overloaded
from text_generation_router.request import TenantId

MAX_WAITING_CHARACTERS = 32_000_000
"""Characters that may wait. A tenant below its share, this limit divided by the tenants that wait, may exceed it, up to
twice its value."""
MIN_CHARACTERS = 1024
"""Cost of the shortest work, so that the number of waiting calls is bounded too."""
SHORT_CHARACTERS = 1 << 14
"""Longer work, tens of milliseconds or more, leaves one worker to shorter work."""
MAX_WAIT_S = 30.0
"""Longest wait for a worker; then the server cannot keep up."""
CHARACTERS_PER_S = 400_000
"""Speed of one worker, for Retry-After: a slow tokenizer on one core."""


@dataclass(slots=True, eq=False)
class _Account:
    """The work of one active tenant."""

    name: TenantId
    served: int
    """Characters served, plus the count it entered with."""
    turns: int = 0
    """Turns that wait or hold a worker."""
    waiting: int = 0
    """Characters that wait."""


@dataclass(slots=True, eq=False)
class Turn:
    """The right to use one worker of a queue, once it is granted."""

    account: _Account
    characters: int
    number: int
    """Order of arrival."""
    granted: asyncio.Future[None]
    is_long: bool
    """True if one worker is left to shorter work."""


class Preparation:
    """The bound of all work before the queue, and the accounts of its tenants. Belongs to one event loop."""

    def __init__(self, max_characters: int = MAX_WAITING_CHARACTERS) -> None:
        self.waiting = 0
        """Characters that wait."""
        self.several = False
        """True once a second tenant was seen."""
        self._first: TenantId | None = None
        self._limit = max_characters
        self._accounts: dict[TenantId, _Account] = {}

    def enter(self, tenant: TenantId) -> _Account:
        """Return the account of a tenant that has one more turn."""
        if self._first is None:
            self._first = tenant
        self.several = self.several or tenant != self._first
        account = self._accounts.get(tenant)
        if account is None:
            served = min((active.served for active in self._accounts.values()), default=0)
            account = self._accounts[tenant] = _Account(tenant, served)
        account.turns += 1
        return account

    def leave(self, account: _Account) -> None:
        """Count a turn of a tenant as over."""
        account.turns -= 1
        if not account.turns:
            del self._accounts[account.name]

    def wait(self, turn: Turn) -> None:
        """Count a turn that begins to wait. Raises Overloaded, CannotKeepUp."""
        account, waiting = turn.account, self.waiting + turn.characters
        if self.waiting and waiting > self._limit:
            own = account.waiting + turn.characters
            tenants = sum(other.waiting > 0 for other in self._accounts.values()) + (not account.waiting)
            if own > self._limit // tenants:
                raise Overloaded(retry_after_s=account.waiting / CHARACTERS_PER_S)
            if waiting > 2 * self._limit:
                raise CannotKeepUp(retry_after_s=self.waiting / CHARACTERS_PER_S)
        self.waiting += turn.characters
        account.waiting += turn.characters

    def waited(self, turn: Turn) -> None:
        """Count a turn that waits no longer."""
        self.waiting -= turn.characters
        turn.account.waiting -= turn.characters


class WorkerQueue:
    """The turns at a fixed number of workers."""

    def __init__(self, stage: Preparation, workers: int, *, only_long: bool = False) -> None:
        """`only_long`: all work is long, and no worker is kept for shorter work."""
        self._stage = stage
        self._short = MAX_WAITING_CHARACTERS if only_long else SHORT_CHARACTERS
        self._workers = workers
        self._free = workers
        self._numbers = itertools.count()
        self._lines: dict[tuple[_Account, bool], dict[Turn, None]] = {}
        """The turns that wait, in order, by tenant and `is_long`. No line is empty."""
        self._long = 0
        """Workers that do long work."""
        self._held: Counter[_Account] = Counter()
        """Workers by tenant."""

    @property
    def waiting(self) -> int:
        """The number of turns that wait."""
        return sum(map(len, self._lines.values()))

    async def take(self, tenant: TenantId, characters: int) -> Turn:
        """Wait for a worker; the caller must give the turn back. Raises Overloaded, CannotKeepUp."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        account, is_long = self._stage.enter(tenant), characters > self._short
        turn = Turn(account, max(characters, MIN_CHARACTERS), next(self._numbers), granted, is_long)
        self._lines.setdefault((turn.account, turn.is_long), {})[turn] = None
        self._grant()
        if granted.done():
            return turn
        try:
            self._stage.wait(turn)
        except BaseException:
            self._drop(turn)
            raise
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self.give_back(turn)
            else:
                self._drop(turn)
            if isinstance(error, TimeoutError):
                raise CannotKeepUp(retry_after_s=self._stage.waiting / CHARACTERS_PER_S) from None
            raise
        finally:
            self._stage.waited(turn)
        return turn

    def give_back(self, turn: Turn) -> None:
        """End a granted turn: its worker is free."""
        account = turn.account
        self._free += 1
        self._long -= turn.is_long
        self._held[account] -= 1
        if not self._held[account]:
            del self._held[account]
        self._stage.leave(account)
        self._grant()

    def _drop(self, turn: Turn) -> None:
        """Remove a turn that was not granted."""
        self._remove(turn)
        self._stage.leave(turn.account)

    def _remove(self, turn: Turn) -> None:
        key = (turn.account, turn.is_long)
        line = self._lines[key]
        del line[turn]
        if not line:
            del self._lines[key]

    def _grant(self) -> None:
        while self._free and (turn := self._next()) is not None:
            self._remove(turn)
            account = turn.account
            account.served += turn.characters
            self._free -= 1
            self._long += turn.is_long
            self._held[account] += 1
            turn.granted.set_result(None)

    def _next(self) -> Turn | None:
        """The next turn: of the tenant served least, then of the one that holds fewer workers, then the oldest."""
        most = max(self._workers - 1, 1)
        best: tuple[int, int, int] | None = None
        found: Turn | None = None
        for (account, is_long), line in self._lines.items():
            held = self._held[account]
            if (is_long and self._long >= most) or (held >= most and self._stage.several):
                continue
            first = next((turn for turn in line if not turn.granted.done()), None)  # the others were cancelled
            if first is not None and (best is None or (account.served, held, first.number) < best):
                best, found = (account.served, held, first.number), first
        return found
