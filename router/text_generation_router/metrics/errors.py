"""The last errors that clients received, for the dashboard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from text_generation_router.error_attributes import Outcome
from text_generation_router.errors import ServingError
from text_generation_router.request import TenantId

MAX_ERRORS = 50
"""Kinds of errors that are remembered. A kind is a route, a status, an error and a tenant: a flood of one leaves the others."""
MAX_ERROR_TEXT = 300
"""Characters of an error's text that are remembered."""


@dataclass(frozen=True, slots=True)
class RecentError:
    """The errors of one kind."""

    route: str
    """The path as it is in the table of routes; "" if there is none."""
    status: int
    """The status in the dialect of the client."""
    error_type: str
    tenant: TenantId
    count: int
    at: float
    """Time of the last one, in seconds of the monotonic clock."""
    text: str
    """The text of the last one."""
    http_request_id: str | None
    """The id of its request."""


_Kinds = dict[tuple[str, int, str, TenantId], RecentError]
"""By route, status, type and tenant."""


class RecentErrors:
    """The last errors, by kind. A client that left is none."""

    def __init__(self) -> None:
        self._kinds: _Kinds = {}
        """In the order of their last errors."""
        self._elsewhere: dict[int, Sequence[RecentError]] = {}
        """The errors that HTTP workers remember, by number of the worker."""

    def add(
        self,
        error: type[ServingError],
        status: int,
        text: str,
        route: str,
        tenant: TenantId,
        http_request_id: str | None,
        now: float,
    ) -> None:
        """Remember an error, with its status in the dialect of the client; `now` is a time of the monotonic clock."""
        if error.outcome is Outcome.CANCELLED:
            return
        _count(self._kinds, RecentError(route, status, error.error_type, tenant, 1, now, text, http_request_id))

    def show(self, worker: int, errors: Sequence[RecentError]) -> None:
        """Include the errors that an HTTP worker remembers now, in place of those that it remembered before."""
        self._elsewhere[worker] = errors

    def keep(self, worker: int) -> None:
        """Remember the errors of an HTTP worker that ended, until newer ones take their places."""
        self._kinds = _merged((*self._kinds.values(), *self._elsewhere.pop(worker, ())))

    def __iter__(self) -> Iterator[RecentError]:
        """Iterate over the kinds, the last error first."""
        if not self._elsewhere:
            return reversed(self._kinds.values())
        return reversed(_merged(chain(self._kinds.values(), *self._elsewhere.values())).values())


def _merged(errors: Iterable[RecentError]) -> _Kinds:
    kinds: _Kinds = {}
    for error in sorted(errors, key=lambda each: each.at):
        _count(kinds, error)
    return kinds


def _count(kinds: _Kinds, error: RecentError) -> None:
    """Count errors of a kind, the last of which is the latest of all."""
    key = (error.route, error.status, error.error_type, error.tenant)
    earlier = kinds.pop(key, None)
    kinds[key] = error if earlier is None else replace(error, count=earlier.count + error.count)
    if len(kinds) > MAX_ERRORS:
        del kinds[next(iter(kinds))]
