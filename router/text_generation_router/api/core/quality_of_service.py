"""The quality of service of a request, from its headers, its body and the operator's settings.

deadlines    the earliest one counts; the operator's are defaults and upper bounds
priority     the header's, then the body's, then the default
salt         the body's, prefixed with the tenant's name where tenants must not share cached prompts
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from text_generation_router.api.core.settings import Settings
from text_generation_router.api.http.bodies import Body
from text_generation_router.api.http.caller import MAX_TIMEOUT_S, Caller, in_range
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import Priority, QualityOfService, TenantId

MAX_SALT_LENGTH = 256
_TIERS = {"priority": Priority.INTERACTIVE, "flex": Priority.BULK}
"""OpenAI's tiers other than the default. Every other word (`auto`, Anthropic's `standard_only`) means the default."""


class QosFields(Body):
    """Base of the bodies of generating routes: fields that every dialect takes beside its own."""

    queue_timeout: float | None = None
    """Seconds from its arrival that the request may wait in the queue; then it fails with 408."""
    timeout: float | None = None
    """Seconds from its arrival until the answer must be whole; then it fails with 408, or its stream with an error."""
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """vLLM's: below 0 it is served sooner, above 0 later than by default."""
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_LENGTH)] | None = None
    """Prompts share cached computation only with prompts of the same salt."""

    @property
    def qos_fields(self) -> dict[str, Any]:
        """The fields as arguments of another body."""
        return {name: getattr(self, name) for name in QosFields.model_fields}

    @property
    def asked_priority(self) -> Priority | None:
        """The priority that the body asks for, or None."""
        if self.priority is None:
            return None
        if self.priority < 0:
            return Priority.INTERACTIVE
        return Priority.BULK if self.priority > 0 else Priority.DEFAULT


class TieredFields(QosFields):
    """The same fields for dialects that have service tiers."""

    service_tier: str | None = None
    """`priority` is served sooner, `flex` later; any other word means the default."""

    @property
    def asked_priority(self) -> Priority | None:
        asked = super().asked_priority
        return _TIERS.get(self.service_tier or "") if asked is None else asked


def quality_of_service(caller: Caller, settings: Settings, *parts: QosFields | None) -> QualityOfService:
    """Return the quality of service that `parts` of a body ask for; the first part that sets a field wins.

    Raises InvalidRequest.
    """
    fields = [part for part in parts if part is not None]
    priorities = (caller.priority, *(part.asked_priority for part in fields), Priority.DEFAULT)
    salt = next((part.cache_salt for part in fields if part.cache_salt is not None), "")
    queue = (*_timeouts("queue_timeout", fields), settings.config.queue_timeout)
    whole = (*_timeouts("timeout", fields), settings.config.request_timeout)
    return QualityOfService(
        tenant=caller.tenant,
        priority=next(priority for priority in priorities if priority is not None),
        salt=_tenant_salt(caller.tenant, salt) if settings.config.prefix_cache_per_tenant else salt,
        first_token_by=caller.first_token_by,
        queue_by=_earliest(caller.queue_by, caller.arrived, queue),
        end_by=_earliest(caller.end_by, caller.arrived, whole),
    )


def _timeouts(name: str, fields: list[QosFields]) -> Iterator[float]:
    for part in fields:
        given: float | None = getattr(part, name)
        if given is None:
            continue
        if not in_range(given):
            raise InvalidRequest(f"`{name}` must be > 0 and <= {MAX_TIMEOUT_S:.0f} seconds. Given: {given:g}")
        yield given


def _earliest(deadline: float | None, arrived: float, timeouts: tuple[float, ...]) -> float | None:
    """Return the earliest deadline. A timeout of 0 means none."""
    deadlines = [arrived + timeout for timeout in timeouts if timeout]
    return min(deadlines if deadline is None else [deadline, *deadlines], default=None)


def _tenant_salt(tenant: TenantId, salt: str) -> str:
    # A header cannot contain NUL, so two tenants never have the same salt.
    return f"{tenant}\0{salt}"
