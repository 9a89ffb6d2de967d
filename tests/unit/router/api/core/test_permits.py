"""Permits: one tenant may take all of them; several tenants have a fair share each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.errors import InvalidRequest, Overloaded
from text_generation_router.permits import Permits
from text_generation_router.request import TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


@contextmanager
def taken(permits: Permits, count: int, tenant: TenantId) -> Iterator[None]:
    permits.acquire(count, tenant)
    try:
        yield
    finally:
        permits.give_back(count, tenant)


def refused(permits: Permits, count: int, tenant: TenantId) -> bool:
    try:
        with taken(permits, count, tenant):
            return False
    except Overloaded:
        return True


def test_at_most_twice_the_limit_is_in_use() -> None:
    permits = Permits(8)
    with ExitStack() as held:
        for tenant, count in (("a", 8), ("b", 4), ("c", 2), ("d", 2)):
            held.enter_context(taken(permits, count, TenantId(tenant)))
        assert permits.in_use == 16
        assert refused(permits, 1, TenantId("e"))  # although 8 // 5 would be its share


async def test_permits_are_returned_after_a_failure() -> None:
    permits = Permits(2)
    with pytest.raises(ZeroDivisionError):
        async with permits.take(2, A):
            raise ZeroDivisionError
    async with permits.take(2, B):
        assert not refused(permits, 1, A)


def test_more_permits_than_the_limit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 2 generations"):
        Permits(2).acquire(3, A)


@pytest.mark.parametrize(("tenant", "seconds"), [(A, 7.5), (B, None), (C, None)])
def test_a_refusal_has_a_retry_hint(tenant: TenantId, seconds: float | None) -> None:
    waits: dict[TenantId, float | None] = {A: 7.5, B: None}
    permits = Permits(1, waits.get)
    with taken(permits, 1, tenant), pytest.raises(Overloaded) as refusal:
        permits.acquire(1, tenant)
    assert refusal.value.retry_after_s == (1.0 if seconds is None else seconds)


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 6), st.booleans()), max_size=60))
def test_a_tenant_within_its_share_is_not_refused_below_twice_the_limit(
    limit: int, arrivals: list[tuple[str, int, bool]]
) -> None:
    permits = Permits(limit)
    held: list[tuple[str, int, ExitStack]] = []
    for name, count, leaves in arrivals:
        if leaves and held:
            held.pop(len(held) // 2)[2].close()
        tenants = {holder for holder, _, _ in held} | {name}
        own = sum(permits_held for holder, permits_held, _ in held if holder == name)
        total = sum(permits_held for _, permits_held, _ in held)
        assert permits.in_use == total <= 2 * limit
        stack = ExitStack()
        try:
            stack.enter_context(taken(permits, count, TenantId(name)))
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
