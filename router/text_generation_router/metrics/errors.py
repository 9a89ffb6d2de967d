"""The last errors that clients received, for the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from text_generation_router.error_attributes import Outcome
from text_generation_router.errors import ServingError
from text_generation_router.request import TenantId

MAX_ERRORS = 50
"""Kinds of errors that are remembered. A kind is a route, an error and a tenant: a flood of one leaves the others."""
MAX_ERROR_TEXT = 300
"""Characters of an error's text that are remembered."""


@dataclass(slots=True)
class RecentError:
    """The errors of one kind."""

    route: str
    """The path as it is in the table of routes; "" if there is none."""
    status: int
    error_type: str
    tenant: TenantId
    count: int = 0
    at: float = 0.0
    """Time of the last one, in seconds of the monotonic clock."""
    text: str = ""
    """The text of the last one."""
    http_request_id: str | None = None
    """The id of its request."""


class RecentErrors:
    """The last errors, by kind. A client that left is none."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, TenantId], RecentError] = {}
        """In the order of their last errors."""

    def add(
        self,
        error: type[ServingError],
        text: str,
        route: str,
        tenant: TenantId,
        http_request_id: str | None,
        now: float,
    ) -> None:
        """Remember an error; `now` is a time of the monotonic clock."""
        if error.outcome is Outcome.CANCELLED:
            return
        key = (route, error.error_type, tenant)
        kind = self._kinds.pop(key, None) or RecentError(route, error.status, error.error_type, tenant)
        self._kinds[key] = kind
        kind.count += 1
        kind.at, kind.text, kind.http_request_id = now, text, http_request_id
        if len(self._kinds) > MAX_ERRORS:
            del self._kinds[next(iter(self._kinds))]

    def __iter__(self) -> Iterator[RecentError]:
        """Iterate over the kinds, the last error first."""
        return reversed(self._kinds.values())
