"""The settings of the HTTP API, as its routes need them."""

from __future__ import annotations

from dataclasses import dataclass

from text_generation_router.api.validation import Limits


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator chose. Composed once, in serve."""

    limits: Limits
    payload_limit: int = 2_000_000
    """Largest request body, in bytes."""
    compute_type: str = "gpu+optimized"
    """Value of the x-compute-type header."""
    compat_return_full_text: bool = True
    """POST /: what `return_full_text` means when it is absent. TGI says true for local models."""
    cors_allow_origin: tuple[str, ...] = ()
    """Origins browsers may call from; none given means any."""
    keep_alive_s: float = 15.0
    """Silence on a stream after which a comment is sent."""
    stall_s: float = 60.0
    """A stream's client that reads nothing for so long is hung up on."""
