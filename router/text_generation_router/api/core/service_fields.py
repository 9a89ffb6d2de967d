"""The fields that every generating route takes beside its dialect's own: how long, how urgent, what may be shared."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from text_generation_router.api.http.schema import Body
from text_generation_router.request import Priority

LONGEST_SALT = 256
_TIERS = {"priority": Priority.INTERACTIVE, "flex": Priority.BULK}
"""OpenAI's tiers that are no default; any other word (`auto`, `default`, Anthropic's `standard_only`) is one."""


class ServiceFields(Body):
    """Base of the bodies that ask for text."""

    queue_timeout: float | None = None
    """Seconds from its arrival that the request may wait in the queue; then it fails with 408."""
    timeout: float | None = None
    """Seconds from its arrival until the answer must be whole; then it fails with 408, or its stream with an error."""
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """vLLM's: below 0 it is served sooner, above 0 later than by default."""
    cache_salt: Annotated[str, Field(max_length=LONGEST_SALT)] | None = None
    """What was computed of a prompt is shared with prompts of the same salt only."""

    @property
    def service_fields(self) -> dict[str, Any]:
        """These fields, for another body that stands for this one."""
        return {name: getattr(self, name) for name in ServiceFields.model_fields}

    @property
    def asked_priority(self) -> Priority | None:
        """How urgent the body calls itself; None: it does not say."""
        if self.priority is None:
            return None
        if self.priority < 0:
            return Priority.INTERACTIVE
        return Priority.BULK if self.priority > 0 else Priority.DEFAULT


class TieredFields(ServiceFields):
    """The same where a dialect has tiers of its own."""

    service_tier: str | None = None
    """`priority` is served sooner, `flex` later; any other word means the default."""

    @property
    def asked_priority(self) -> Priority | None:
        asked = super().asked_priority
        return _TIERS.get(self.service_tier or "") if asked is None else asked
