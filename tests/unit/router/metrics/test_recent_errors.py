"""The last errors, by kind."""

from __future__ import annotations

from text_generation_router.errors import ClientLeft, GenerationFailed, InvalidRequest, Overloaded, ServingError
from text_generation_router.metrics.errors import MAX_ERRORS, MAX_TENANTS, RecentErrors
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


def test_refusals_displace_no_fault_of_the_server_and_tenants_are_counted() -> None:
    errors = RecentErrors()
    errors.add(GenerationFailed, 424, "out of memory", "/generate", TenantId("a"), "id", 1.0)
    for number in range(2 * MAX_ERRORS):
        errors.add(InvalidRequest, 400, "bad", f"/{number}", TenantId("a"), "id", 2.0 + number)
    for number in range(2 * MAX_TENANTS):
        errors.add(
            InvalidRequest, 400, "bad \udcff", "/last", TenantId(f"{number % MAX_TENANTS}"), "id", 1000.0 + number
        )
    for number in range(2 * MAX_ERRORS):
        errors.add(InvalidRequest, 400, f"no {'x' * number}", "/many", TenantId("a"), "id", 2000.0 + number)
        errors.add(InvalidRequest, 400, f"given: {number}", "/numbers", TenantId("a"), "id", 3000.0 + number)
    shown = list(errors)
    assert [kind.count for kind in shown if kind.route == "/numbers"] == [2 * MAX_ERRORS]
    assert "/last" in {kind.route for kind in shown}, "a flood of texts leaves the others"
    first, last, *_ = (kind for kind in shown if kind.route not in ("/many", "/numbers"))
    assert (first.text, first.fault, last.fault, shown[0]) == ("out of memory", True, False, first)
    assert (last.route, last.count, len(last.tenants)) == ("/last", 2 * MAX_TENANTS, MAX_TENANTS)
