"""Fairness: what tenants were served while all of them had something waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from text_generation_router.request import TenantId


class Fairness:
    """Adds up service, prompt tokens computed and new ones, over the seconds in which every tenant was backlogged."""

    def __init__(self) -> None:
        self._served: dict[TenantId, int] = {}
        self._before: dict[TenantId, int] = {}
        self._backlogged = False
        self._counted: dict[TenantId, int] = {}

    def serve(self, tenant: TenantId, tokens: int) -> None:
        """So many tokens were computed for `tenant`."""
        self._served[tenant] = self._served.get(tenant, 0) + tokens

    def tick(self, waiting: Mapping[TenantId, int]) -> None:
        """A second is over; `waiting` are the requests of each tenant that have never left the queue."""
        backlogged = len(waiting) > 1 and all(waiting.values())
        if backlogged and self._backlogged:
            for tenant in waiting:
                served = self._served.get(tenant, 0) - self._before.get(tenant, 0)
                self._counted[tenant] = self._counted.get(tenant, 0) + served
        self._backlogged = backlogged
        self._before = dict(self._served)

    @property
    def jain(self) -> float | None:
        """Jain's index of what was counted: 1 where all got the same, 1/n where one of n got all. None: nothing was."""
        return jain_index(self._counted.values())


def jain_index(shares: Iterable[float]) -> float | None:
    """(Σ x)² / (n · Σ x²), after Jain, Chiu and Hawe (1984); None if all are 0."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None
