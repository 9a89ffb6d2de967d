"""FairQueue: who leaves the queue next. Fair between tenants, urgent before patient, and nobody for ever.

1. Who was sent back (preempted, or its replica was lost) comes first of all, in order of arrival.
2. Between tenants: the least key goes next, ties by arrival of the entry it would send.

       key = tokens served / weight - LEAD[class of the entry it would send]

   QualityOfService is charged from outside (`charge`); how a tenant comes in that had nothing waiting, see `tenants`. A class buys
   a bounded lead, in tokens, and not a pass: who floods at a high class gets that far ahead of the others, once.
   A low class is that far behind them, at most.
3. Within a tenant: the earliest due goes next, ties by arrival.

       due = arrived + AGEING_S x class, at most first_token_by, at least arrived

   So a class is first come, first served, and a bulk request goes before interactive ones that came 60 s after it. A hope
   already past when the request arrived counts as "now": wishes do not overtake who waited.

Expired entries are taken out by `expire`: call it before `pop`, or what nobody waits for any more may be the most urgent.
With one tenant and one class this is first come, first served.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from text_generation_router.request import Priority, QualityOfService, Request, TenantId
from text_generation_router.scheduling.lazy_heap import Key, LazyHeap
from text_generation_router.scheduling.tenants import Tenant, Tenants

AGEING_S = 30.0
"""Seconds of waiting that make up for one class."""
LEAD = {Priority.SYSTEM: 64_000, Priority.INTERACTIVE: 16_000, Priority.DEFAULT: 0, Priority.BULK: -16_000}
"""Virtual tokens that a class is ahead of others between tenants."""

NO_WEIGHTS: Mapping[TenantId, float] = MappingProxyType({})


class Queued(Protocol):
    """What the queue wants to know of an entry. None of it changes while the entry is queued."""

    @property
    def request(self) -> Request:
        """What was asked for, and what service it is due."""
        ...

    @property
    def arrived(self) -> float:
        """When, in seconds of the clock that the request's times are of."""
        ...

    @property
    def arrival(self) -> int:
        """Order of arrival; no two entries have the same."""
        ...

    @property
    def work(self) -> int:
        """Tokens it is expected to cost: of the prompt those not cached, and new ones."""
        ...


E = TypeVar("E", bound=Queued)


def due(qos: QualityOfService, arrived: float) -> float:
    """When a request ought to have had its turn; orders the entries of one tenant. In seconds."""
    by_class = arrived + AGEING_S * qos.priority
    if qos.first_token_by is None:
        return by_class
    return max(arrived, min(by_class, qos.first_token_by))


@dataclass(slots=True, eq=False)
class _Place(Generic[E]):
    """An entry's place in the queue."""

    entry: E
    tenant: Tenant
    key: Key
    """Due and arrival; of one sent back, arrival alone."""
    lead: int
    expires: Key
    work: int
    sent_back: bool
    aside: bool = False


def _by_key(place: _Place[E]) -> Key:
    return place.key


def _by_expiry(place: _Place[E]) -> Key:
    return place.expires


@dataclass(slots=True, eq=False)
class _Line(Generic[E]):
    """The entries of one tenant that wait, less those set aside."""

    tenant: Tenant
    places: LazyHeap[_Place[E]] = field(default_factory=lambda: LazyHeap(_by_key))
    head: _Place[E] | None = None


def _by_service(line: _Line[E]) -> Key:
    assert line.head is not None, "only lines with a head are compared"
    return line.tenant.counter - line.head.lead, line.head.key[1]


class FairQueue(Generic[E]):
    """Entries that wait, all operations in O(log n) amortised."""

    def __init__(self, weights: Mapping[TenantId, float] = NO_WEIGHTS) -> None:
        """`weights`: shares of tenants, 0.001 to 1000; who is not named has 1. Raises ValueError."""
        self._tenants = Tenants(weights)
        self._places: dict[int, _Place[E]] = {}
        """By arrival."""
        self._lines: dict[TenantId, _Line[E]] = {}
        """Of tenants that wait."""
        self._ready: LazyHeap[_Line[E]] = LazyHeap(_by_service)
        """Lines with a head."""
        self._sent_back: LazyHeap[_Place[E]] = LazyHeap(_by_key)
        self._expiring: LazyHeap[_Place[E]] = LazyHeap(_by_expiry)
        self._work = 0

    # ------------------------------------------------------------------------------------------------------- in and out

    def put(self, entry: E) -> None:
        """Queue a new entry."""
        qos = entry.request.qos
        ends = (time for time in (qos.queue_by, qos.end_by) if time is not None)
        self._enter(entry, due(qos, entry.arrived), min(ends, default=inf), sent_back=False)

    def put_back(self, entry: E) -> None:
        """Queue an entry that had left the queue and must run again: before all others. Its `queue_by` is met."""
        end_by = entry.request.qos.end_by
        self._enter(entry, entry.arrival, inf if end_by is None else end_by, sent_back=True)

    def peek(self) -> E | None:
        """Who goes next; None if nobody waits, but for those set aside."""
        place = self._next()
        return None if place is None else place.entry

    def pop(self) -> E:
        """Take out whom `peek` names. Charges nothing. Raises IndexError where `peek` is None."""
        place = self._next()
        if place is None:
            raise IndexError("nobody waits")
        self._take_out(place)
        return place.entry

    def remove(self, entry: E) -> None:
        """Take out an entry that is queued, set aside or not."""
        place = self._places.get(entry.arrival)
        assert place is not None, "only a queued entry is removed"
        self._take_out(place)

    def skip(self) -> E:
        """Set aside whom `peek` names, to see who is behind it. Raises IndexError where `peek` is None.

        It stays queued: it counts, may be removed and may expire; only its turn does not come before `unskip`.
        """
        place = self._next()
        if place is None:
            raise IndexError("nobody waits")
        place.aside = True
        self._hide(place)
        return place.entry

    def unskip(self, entries: Iterable[E]) -> None:
        """Give entries that were set aside their places again; those that left the queue meanwhile stay away."""
        for entry in entries:
            place = self._places.get(entry.arrival)
            if place is not None and place.aside:
                place.aside = False
                self._show(place)

    def expire(self, now: float) -> list[E]:
        """Take out the entries that have expired at `now`, earliest first.

        Those are due to be in a slot by `queue_by`, and done by `end_by`; for who was sent back only `end_by` counts.
        """
        expired: list[E] = []
        while (place := self._expiring.first()) is not None and place.expires[0] <= now:
            self._take_out(place)
            expired.append(place.entry)
        return expired

    @property
    def next_expiry(self) -> float | None:
        """When `expire` will next have something to give; None if never."""
        place = self._expiring.first()
        return None if place is None else place.expires[0]

    # ---------------------------------------------------------------------------------------------------------- service

    def charge(self, tenant: TenantId, tokens: int) -> None:
        """`tenant` was served so many tokens; fewer than none correct an earlier charge that was too high."""
        self._tenants.charge(tenant, tokens)
        if tokens < 0:
            line = self._lines.get(tenant)
            if line is not None and line.head is not None:
                self._ready.put(line)

    def started(self, tenant: TenantId) -> None:
        """An entry of `tenant` runs."""
        self._tenants.started(tenant)

    def ended(self, tenant: TenantId) -> None:
        """An entry of `tenant` runs no more."""
        self._tenants.ended(tenant)

    # ---------------------------------------------------------------------------------------------------------- figures

    def __len__(self) -> int:
        """Entries in the queue; those set aside count."""
        return len(self._places)

    def __iter__(self) -> Iterator[E]:
        """Every entry in the queue, in the order in which they entered it."""
        return (place.entry for place in self._places.values())

    def work(self, tenant: TenantId | None = None) -> int:
        """Tokens that the queue is expected to cost, or those of one tenant."""
        if tenant is None:
            return self._work
        account = self._tenants.find(tenant)
        return 0 if account is None else account.work

    def share(self, tenant: TenantId) -> float:
        """Which part of the service this tenant gets while all active ones want all they can get; in (0, 1]."""
        return self._tenants.share(tenant)

    @property
    def tenants(self) -> int:
        """Tenants remembered: the active ones, and a bounded number of idle ones in debt."""
        return len(self._tenants)

    # ---------------------------------------------------------------------------------------------------------- private

    def _enter(self, entry: E, rank: float, expires: float, *, sent_back: bool) -> None:
        arrival, qos, work = entry.arrival, entry.request.qos, entry.work
        assert arrival not in self._places, "an entry is queued once"
        tenant = self._tenants.queue(qos.tenant, work, waits=not sent_back)
        place = _Place(entry, tenant, (rank, arrival), LEAD[qos.priority], (expires, arrival), work, sent_back)
        self._places[arrival] = place
        self._work += work
        if expires < inf:
            self._expiring.put(place)
        self._show(place)

    def _take_out(self, place: _Place[E]) -> None:
        tenant = place.tenant
        if not place.aside:
            self._hide(place)
        self._expiring.discard(place)
        del self._places[place.key[1]]
        self._work -= place.work
        self._tenants.leave(tenant, place.work, waited=not place.sent_back)
        if not tenant.waiting:
            self._lines.pop(tenant.name, None)

    def _next(self) -> _Place[E] | None:
        if (place := self._sent_back.first()) is not None:
            return place
        line = self._ready.first()
        return None if line is None else line.head

    def _show(self, place: _Place[E]) -> None:
        """From now on its turn may come."""
        if place.sent_back:
            self._sent_back.put(place)
            return
        line = self._lines.get(place.tenant.name)
        if line is None:
            line = self._lines[place.tenant.name] = _Line(place.tenant)
        line.places.put(place)
        if line.head is None or place.key < line.head.key:
            line.head = place
            self._ready.put(line)

    def _hide(self, place: _Place[E]) -> None:
        """Its turn does not come."""
        if place.sent_back:
            self._sent_back.discard(place)
            return
        line = self._lines[place.tenant.name]
        line.places.discard(place)
        if place is line.head:
            line.head = line.places.first()
            if line.head is None:
                self._ready.discard(line)
            else:
                self._ready.put(line)
