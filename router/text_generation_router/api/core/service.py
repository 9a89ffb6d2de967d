"""What a request is due, from all that was said of it: its headers, its body, the operator's settings.

deadlines    the nearest one counts; the operator's are defaults and bounds at once
priority     the header's word, then the body's; else the default
salt         the body's, and the tenant's name beside it where the operator keeps tenants apart
"""

from __future__ import annotations

from collections.abc import Iterator

from text_generation_router.api.core.service_fields import ServiceFields
from text_generation_router.api.core.settings import Settings
from text_generation_router.api.http.caller import MAX_TIMEOUT_S, Caller, in_range
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import Priority, Service, TenantId


def service_of(caller: Caller, settings: Settings, *asked: ServiceFields | None) -> Service:
    """What a request is due; `asked` are the parts of its body that may say so, the one that wins first.

    Raises InvalidRequest.
    """
    fields = [one for one in asked if one is not None]
    priorities = (caller.priority, *(one.asked_priority for one in fields), Priority.DEFAULT)
    salt = next((one.cache_salt for one in fields if one.cache_salt is not None), "")
    queue = (*_timeouts("queue_timeout", fields), settings.queue_timeout_s)
    whole = (*_timeouts("timeout", fields), settings.request_timeout_s)
    return Service(
        tenant=caller.tenant,
        priority=next(one for one in priorities if one is not None),
        salt=_salted(caller.tenant, salt) if settings.salt_per_tenant else salt,
        first_token_by=caller.first_token_by,
        queue_by=_nearest(caller.queue_by, caller.arrived, queue),
        end_by=_nearest(caller.end_by, caller.arrived, whole),
    )


def _timeouts(name: str, fields: list[ServiceFields]) -> Iterator[float]:
    for one in fields:
        given: float | None = getattr(one, name)
        if given is None:
            continue
        if not in_range(given):
            raise InvalidRequest(f"`{name}` must be > 0 and <= {MAX_TIMEOUT_S:.0f} seconds. Given: {given:g}")
        yield given


def _nearest(given: float | None, arrived: float, timeouts: tuple[float, ...]) -> float | None:
    """The nearest of a deadline and of timeouts, 0 of which are none."""
    deadlines = [arrived + timeout for timeout in timeouts if timeout]
    return min(deadlines if given is None else [given, *deadlines], default=None)


def _salted(tenant: TenantId, salt: str) -> str:
    # No header can carry a NUL, so that no tenant's salt is another's.
    return f"{tenant}\0{salt}"
