"""The last errors that clients received, for the dashboard."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import chain
from operator import attrgetter

from text_generation_router.error_attributes import Outcome
from text_generation_router.errors import ServingError
from text_generation_router.request import TenantId

MAX_ERRORS = 50
"""Kinds of errors that are remembered. A kind is a route, a status, a type and a text, whatever numbers are in it."""
MAX_TENANTS = 50
"""Tenants that are remembered of a kind."""
MAX_ERROR_TEXT = 300
"""Characters of an error's text that are remembered."""


@dataclass(frozen=True, slots=True)
class RecentError:
    route: str
    """The path as it is in the table of routes; "" if there is none."""
    status: int
    """The status in the dialect of the client."""
    error_type: str
    fault: bool
    """The server failed, not its caller. A fault is forgotten after all others."""
    tenants: list[TenantId]
    """The callers that got it, at most MAX_TENANTS."""
    count: int
    at: float
    """Time of the last one, in seconds of the monotonic clock."""
    text: str
    """The text of the last one."""
    http_request_id: str | None
    """The id of its request."""


_Kinds = dict[tuple[str, int, str, str], RecentError]
"""By route, status, type and text."""
_NUMBER = re.compile(r"\d+")


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
        text = text.encode(errors="replace").decode()  # a path may have had bytes of any kind
        fault = error.outcome is Outcome.ERROR or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        kind = RecentError(route, status, error.error_type, fault, [tenant], 1, now, text, http_request_id)
        _count(self._kinds, kind)

    def show(self, worker: int, errors: Sequence[RecentError]) -> None:
        """Include the errors that an HTTP worker remembers now, in place of those that it remembered before."""
        self._elsewhere[worker] = errors

    def keep(self, worker: int) -> None:
        """Remember the errors of an HTTP worker that ended, until newer ones take their places."""
        self._kinds = _merged((*self._kinds.values(), *self._elsewhere.pop(worker, ())))

    def __iter__(self) -> Iterator[RecentError]:
        """Iterate over the kinds: faults first, then the last error first."""
        kinds = self._kinds
        if self._elsewhere:
            kinds = _merged(chain(kinds.values(), *self._elsewhere.values()))
        return iter(sorted(kinds.values(), key=attrgetter("fault", "at"), reverse=True))


def _merged(errors: Iterable[RecentError]) -> _Kinds:
    kinds: _Kinds = {}
    for error in sorted(errors, key=attrgetter("at")):
        _count(kinds, error)
    return kinds


def _count(kinds: _Kinds, error: RecentError) -> None:
    """Count errors of a kind, the last of which is the latest of all."""
    # The text of a request without a route has its path, which clients make up.
    key = (error.route, error.status, error.error_type, error.route and _NUMBER.sub("", error.text))
    if (earlier := kinds.pop(key, None)) is not None:
        tenants = sorted({*earlier.tenants, *error.tenants})[:MAX_TENANTS]
        error = replace(error, tenants=tenants, count=earlier.count + error.count)
    kinds[key] = error
    if len(kinds) > MAX_ERRORS:
        texts = Counter(each[:-1] for each in kinds)
        # The oldest of the type with most texts, so that a flood of ever new texts leaves the other types.
        del kinds[min(kinds, key=lambda each: (kinds[each].fault, -texts[each[:-1]]))]
