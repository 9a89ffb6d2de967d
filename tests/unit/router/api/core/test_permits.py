"""Places in the building: as many as there are for one tenant alone, and a share for each where there are several."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.api.core.admission import Permits
from text_generation_router.errors import InvalidRequest, Overloaded
from text_generation_router.request import TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def refused(permits: Permits, count: int, tenant: TenantId) -> bool:
    try:
        with permits.take(count, tenant):
            return False
    except Overloaded:
        return True


def test_one_tenant_has_the_building_and_no_more() -> None:
    permits = Permits(4)
    with permits.take(4, A):
        assert refused(permits, 1, A)
    assert permits.in_use == 0


def test_who_comes_late_finds_a_share_in_a_full_building() -> None:
    permits = Permits(4)
    with permits.take(4, A):
        with permits.take(1, B), permits.take(1, B):
            assert permits.in_use == 6
            assert refused(permits, 1, B)  # half the building is its share
            assert refused(permits, 1, A)  # more than its share already
        assert not refused(permits, 2, B)
        assert refused(permits, 3, B)


def test_the_share_shrinks_with_every_tenant_that_holds_a_place() -> None:
    permits = Permits(4)
    with permits.take(4, A), permits.take(1, B):
        assert not refused(permits, 1, C)  # 4 // 3
        assert refused(permits, 2, C)
    with permits.take(3, A), permits.take(1, B):
        assert refused(permits, 2, C)
    assert not refused(permits, 4, C)  # whoever left counts no more


def test_the_building_holds_twice_its_limit_at_most() -> None:
    permits = Permits(8)
    with ExitStack() as held:
        for tenant, count in (("a", 8), ("b", 4), ("c", 2), ("d", 2)):
            held.enter_context(permits.take(count, TenantId(tenant)))
        assert permits.in_use == 16
        assert refused(permits, 1, TenantId("e"))  # although 8 // 5 would be its share


def test_places_are_given_back_after_a_failure_to_whom_they_were_taken_from() -> None:
    permits = Permits(2)
    with pytest.raises(ZeroDivisionError), permits.take(2, A):
        raise ZeroDivisionError
    with permits.take(2, B):
        assert not refused(permits, 1, A)


def test_so_many_there_never_are() -> None:
    with pytest.raises(InvalidRequest, match="at most 2 generations"), Permits(2).take(3, A):
        pass


@pytest.mark.parametrize(("tenant", "seconds"), [(A, 7.5), (B, None), (C, None)])
def test_a_refusal_says_when_to_come_again(tenant: TenantId, seconds: float | None) -> None:
    waits: dict[TenantId, float | None] = {A: 7.5, B: None}
    permits = Permits(1, waits.get)
    with permits.take(1, tenant), pytest.raises(Overloaded) as refusal, permits.take(1, tenant):
        pass
    assert refusal.value.retry_after_s == (1.0 if seconds is None else seconds)


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 6), st.booleans()), max_size=60),
)
def test_nobody_within_its_share_is_refused_below_twice_the_limit(
    limit: int, arrivals: list[tuple[str, int, bool]]
) -> None:
    permits = Permits(limit)
    held: list[tuple[str, int, ExitStack]] = []
    for name, count, leaves in arrivals:
        if leaves and held:
            held.pop(len(held) // 2)[2].close()
        tenants = {one for one, _, _ in held} | {name}
        own = sum(places for one, places, _ in held if one == name)
        total = sum(places for _, places, _ in held)
        assert permits.in_use == total <= 2 * limit
        stack = ExitStack()
        try:
            stack.enter_context(permits.take(count, TenantId(name)))
        except InvalidRequest:
            assert count > limit
        except Overloaded:
            assert total + count > limit
            assert len(tenants) == 1 or own + count > limit // len(tenants) or total + count > 2 * limit
        else:
            assert total + count <= limit or (len(tenants) > 1 and own + count <= limit // len(tenants))
            held.append((name, count, stack))
    for _, _, stack in held:
        stack.close()
    assert permits.in_use == 0
    assert vars(permits)["_held"] == {}
