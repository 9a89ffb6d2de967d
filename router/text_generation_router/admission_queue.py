"""The stage before the queue: tokenizing, chat templates and proofs of grammars, in turns between tenants.

Each kind of work has its own workers, threads or processes, and a `WorkerQueue` that decides who gets the next free one.
All queues share one `PendingWork`: it bounds the characters that wait and counts those that each tenant was served.

The worker goes to the tenant that was served the fewest characters. Two rules keep a worker for those who come later:
long work never holds the last one, nor does one tenant once another was seen. A tenant that was idle enters with the
smallest count of the active ones: it has not accumulated credit, and is not charged for idle capacity.
"""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field

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
    claims: int = 0
    """Claims that wait or hold a worker."""
    waiting: int = 0
    """Characters that wait."""


@dataclass(slots=True, eq=False)
class Claim:
    """A claim to one worker of a queue; once granted, the right to use it."""

    account: _Account
    characters: int
    number: int
    """Order of arrival."""
    granted: asyncio.Future[None]
    is_long: bool
    """True if one worker is left to shorter work."""


@dataclass(slots=True, eq=False)
class PendingWork:
    """The bound of all work before the queue, and the accounts of its tenants. Belongs to one event loop."""

    limit: int = MAX_WAITING_CHARACTERS
    """Most characters that wait."""
    waiting: int = 0
    """Characters that wait."""
    several: bool = False
    """True once a second tenant was seen."""
    _first: TenantId | None = None
    _accounts: dict[TenantId, _Account] = field(default_factory=dict)

    def enter(self, tenant: TenantId) -> _Account:
        """Return the account of a tenant that has one more claim."""
        if self._first is None:
            self._first = tenant
        self.several = self.several or tenant != self._first
        account = self._accounts.get(tenant)
        if account is None:
            served = min((active.served for active in self._accounts.values()), default=0)
            account = self._accounts[tenant] = _Account(tenant, served)
        account.claims += 1
        return account

    def leave(self, account: _Account) -> None:
        """Count a claim of a tenant as over."""
        account.claims -= 1
        if not account.claims:
            del self._accounts[account.name]

    def wait(self, claim: Claim) -> None:
        """Count a claim that begins to wait. Raises Overloaded, CannotKeepUp."""
        account, waiting = claim.account, self.waiting + claim.characters
        if self.waiting and waiting > self.limit:
            own = account.waiting + claim.characters
            tenants = sum(other.waiting > 0 for other in self._accounts.values()) + (not account.waiting)
            if own > self.limit // tenants:
                raise Overloaded(retry_after_s=account.waiting / CHARACTERS_PER_S)
            if waiting > 2 * self.limit:
                raise CannotKeepUp(retry_after_s=self.waiting / CHARACTERS_PER_S)
        self.waiting += claim.characters
        account.waiting += claim.characters

    def waited(self, claim: Claim) -> None:
        """Count a claim that waits no longer."""
        self.waiting -= claim.characters
        claim.account.waiting -= claim.characters


class WorkerQueue:
    """The claims to a fixed number of workers."""

    def __init__(self, stage: PendingWork, workers: int, *, only_long: bool = False) -> None:
        """`only_long`: all work is long, and no worker is kept for shorter work."""
        self._stage = stage
        self._short = MAX_WAITING_CHARACTERS if only_long else SHORT_CHARACTERS
        self._workers = workers
        self._free = workers
        self._numbers = itertools.count()
        self._lines: dict[tuple[_Account, bool], dict[Claim, None]] = {}
        """The claims that wait, in order, by tenant and `is_long`. No line is empty."""
        self._long = 0
        """Workers that do long work."""
        self._held: Counter[_Account] = Counter()
        """Workers by tenant."""

    async def take(self, tenant: TenantId, characters: int) -> Claim:
        """Wait for a worker; the caller must give the claim back. Raises Overloaded, CannotKeepUp."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        account, is_long = self._stage.enter(tenant), characters > self._short
        claim = Claim(account, max(characters, MIN_CHARACTERS), next(self._numbers), granted, is_long)
        self._lines.setdefault((claim.account, claim.is_long), {})[claim] = None
        self._grant()
        if granted.done():
            return claim
        try:
            self._stage.wait(claim)
        except BaseException:
            self._drop(claim)
            raise
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self.give_back(claim)
            else:
                self._drop(claim)
            if isinstance(error, TimeoutError):
                raise CannotKeepUp(retry_after_s=self._stage.waiting / CHARACTERS_PER_S) from None
            raise
        finally:
            self._stage.waited(claim)
        return claim

    def give_back(self, claim: Claim) -> None:
        """End a granted claim: its worker is free."""
        account = claim.account
        self._free += 1
        self._long -= claim.is_long
        self._held[account] -= 1
        if not self._held[account]:
            del self._held[account]
        self._stage.leave(account)
        self._grant()

    def _drop(self, claim: Claim) -> None:
        """Remove a claim that was not granted."""
        self._remove(claim)
        self._stage.leave(claim.account)

    def _remove(self, claim: Claim) -> None:
        key = (claim.account, claim.is_long)
        line = self._lines[key]
        del line[claim]
        if not line:
            del self._lines[key]

    def _grant(self) -> None:
        while self._free and (claim := self._next()) is not None:
            self._remove(claim)
            account = claim.account
            account.served += claim.characters
            self._free -= 1
            self._long += claim.is_long
            self._held[account] += 1
            claim.granted.set_result(None)

    def _next(self) -> Claim | None:
        """The next claim: of the tenant served least, then of the one that holds fewer workers, then the oldest."""
        most = max(self._workers - 1, 1)
        firsts = (
            next((claim for claim in line if not claim.granted.done()), None)  # the others were cancelled
            for (account, is_long), line in self._lines.items()
            if not ((is_long and self._long >= most) or (self._held[account] >= most and self._stage.several))
        )
        claims = (claim for claim in firsts if claim is not None)
        return min(claims, key=lambda each: (each.account.served, self._held[each.account], each.number), default=None)
