"""What OpenAI's answers are called: unique ids, the model, the moment."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

from text_generation_router.api.core.settings import Settings


@dataclass(frozen=True, slots=True)
class Named:
    """The head of one answer."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    fingerprint: str


def named(prefix: str, model: str | None, settings: Settings) -> Named:
    """A new name; as in TGI the model is what the client called it, if that is not `tgi`."""
    served = settings.model_id if model in (None, "", "tgi") else str(model)
    return Named(f"{prefix}{secrets.token_hex(12)}", now(), served, settings.fingerprint)


def now() -> int:
    """Seconds since 1970."""
    return int(datetime.now(UTC).timestamp())


def new_call_id() -> str:
    """An id for a tool call; Mistral's templates want nine letters or digits at its end."""
    return f"call_{secrets.token_hex(12)}"
