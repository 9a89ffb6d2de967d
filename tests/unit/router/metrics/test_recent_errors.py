"""The last errors, by kind."""

from __future__ import annotations

from text_generation_router.errors import ClientLeft, InvalidRequest, Overloaded, ServingError
from text_generation_router.metrics.errors import MAX_ERRORS, RecentErrors
from text_generation_router.request import TenantId


def test_a_flood_of_one_kind_leaves_the_others() -> None:
    errors = RecentErrors()

    def add(error: type[ServingError], route: str, now: float) -> None:
        errors.add(error, error.open_status, f"text {now}", route, TenantId("a"), "id", now)

    add(InvalidRequest, "/generate", 1.0)
    for now in range(2, 1000):
        add(Overloaded, "/generate", now)
    add(ClientLeft, "/generate", 1000)
    assert [(kind.status, kind.count, kind.at, kind.text) for kind in errors] == [
        (429, 998, 999, "text 999"),
        (400, 1, 1.0, "text 1.0"),
    ]
    for number in range(MAX_ERRORS):
        add(Overloaded, f"/{number}", 2000 + number)
    assert [kind.route for kind in errors] == [f"/{number}" for number in reversed(range(MAX_ERRORS))]
