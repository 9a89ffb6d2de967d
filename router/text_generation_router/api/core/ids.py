"""The head of an answer: id, model, time."""

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from text_generation_router.api.core.settings import MODEL_ALIAS, Settings


@dataclass(frozen=True, slots=True)
class Named:
    """The head of one answer."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    fingerprint: str

    def head(self, kind: str) -> bytes:
        """Return the first members of an answer or chunk of this `kind`, as a JSON object without its closing brace."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return orjson.dumps(head | {"system_fingerprint": self.fingerprint})[:-1]


def named(prefix: str, model: str | None, settings: Settings) -> Named:
    """Return a new head; as in TGI the model has the name the client gave it, unless that is `tgi`."""
    served = settings.model_id if model in (None, "", MODEL_ALIAS) else str(model)
    return Named(f"{prefix}{secrets.token_hex(12)}", now(), served, settings.fingerprint)


def now() -> int:
    """Seconds since 1970."""
    return int(datetime.now(UTC).timestamp())


def new_call_id() -> str:
    """Return an id for a tool call; Mistral's templates want nine letters or digits at its end."""
    return f"call_{secrets.token_hex(12)}"
