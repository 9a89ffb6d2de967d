"""The settings of the HTTP API, as its routes need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from text_generation_router.api.http.caller import ApiKeys

MODEL_ALIAS = "tgi"
"""The name that TGI's clients give to any model."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request."""

    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int = 1 << 20
    """Token ids that clients name are below this."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Parameters that the engine does not support: name on the wire → reason."""

    def __post_init__(self) -> None:
        assert 0 < self.max_input_tokens < self.max_total_tokens, "the longest prompt must leave room for a new token"


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
    model_id: str = ""
    """What answers call the model."""
    fingerprint: str = "native"
    """`system_fingerprint` of OpenAI's answers: version and build."""
    max_client_batch_size: int = 4
    """Most prompts in one request."""
    cors_allow_origin: tuple[str, ...] = ()
    """Origins browsers may call from; none given means any."""
    keep_alive_s: float = 15.0
    """Silence on a stream after which a comment is sent."""
    stall_s: float = 60.0
    """A stream's client that reads nothing for so long is hung up on."""
    queue_timeout_s: float = 0.0
    """Longest wait in the queue, whatever a request asks for; 0: any."""
    request_timeout_s: float = 0.0
    """Longest time from a request's arrival to its end, whatever it asks for; 0: any."""
    salt_per_tenant: bool = False
    """Whether tenants share nothing of what was computed of their prompts."""
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    """Who may call; none given means anyone."""
    vertex_predict_routes: tuple[str, ...] = ()
    """Where else Vertex AI asks for predictions: its AIP_PREDICT_ROUTE."""
    vertex_health_routes: tuple[str, ...] = ()
    """Where else it asks for our health: its AIP_HEALTH_ROUTE."""
