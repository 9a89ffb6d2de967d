"""The limit of concurrent generations: counted in this process, or in the scheduler process (remote_limits.py)."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from text_generation_router.errors import InvalidRequest, Overloaded
from text_generation_router.request import DEFAULT_TENANT, TenantId


def no_deadline() -> float | None:
    """Return the deadline of a request without one."""
    return None


class ConcurrencyLimit(Protocol):
    """A limit of concurrent generations, wherever it is counted."""

    limit: int

    def take(
        self, count: int, tenant: TenantId = DEFAULT_TENANT, by: Callable[[], float | None] = no_deadline
    ) -> AbstractAsyncContextManager[None]:
        """Hold `count` permits inside the block.

        `by` returns the time of the monotonic clock by which the request must have them. It is called only where permits
        are waited for: in a router of one process it costs nothing.

        Raises Overloaded, DeadlineExceeded, Unhealthy, or InvalidRequest if `count` exceeds the limit.
        """


@dataclass(slots=True)
class Permits:
    """The limit of concurrent generations, counted here. Requests above it are refused at once.

    A tenant below its fair share (`limit` divided by the tenants that hold permits) may exceed the limit, up to twice
    its value. So a tenant that comes late finds a permit although others hold all of them.
    """

    limit: int
    retry_after: Callable[[TenantId], float | None] = lambda tenant: None
    """Returns the expected wait of a tenant's next request in seconds; None: unknown."""
    in_use: int = 0
    _held: dict[TenantId, int] = field(default_factory=dict)
    """Permits by tenant; none is 0."""

    @asynccontextmanager
    async def take(
        self, count: int, tenant: TenantId = DEFAULT_TENANT, by: Callable[[], float | None] = no_deadline
    ) -> AsyncIterator[None]:
        """Hold `count` permits inside the block, without waiting. Raises Overloaded, InvalidRequest."""
        self.acquire(count, tenant)
        try:
            yield
        finally:
            self.give_back(count, tenant)

    def acquire(self, count: int, tenant: TenantId) -> None:
        """Hold `count` permits until `give_back`. Raises Overloaded, InvalidRequest."""
        if count > self.limit:
            raise InvalidRequest(f"at most {self.limit} generations may be asked for at once. Given: {count}")
        if self.in_use + count > self.limit and not self._has_share_left(count, tenant):
            raise Overloaded(retry_after_s=self.retry_after(tenant))
        self.hold(count, tenant)

    def hold(self, count: int, tenant: TenantId) -> None:
        """Hold `count` permits until `give_back`, also beyond the limit."""
        self.in_use += count
        self._held[tenant] = self._held.get(tenant, 0) + count

    def give_back(self, count: int, tenant: TenantId) -> None:
        self.in_use -= count
        if held := self._held.pop(tenant, 0) - count:
            self._held[tenant] = held

    def _has_share_left(self, count: int, tenant: TenantId) -> bool:
        tenants = len(self._held.keys() | {tenant})
        share = self.limit // tenants
        return self._held.get(tenant, 0) + count <= share and self.in_use + count <= 2 * self.limit
