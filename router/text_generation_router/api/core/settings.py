"""The settings of the HTTP API."""

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
    """The operator's settings, as the routes use them."""

    limits: Limits
    payload_limit: int = 2_000_000
    """Largest request body, in bytes."""
    compute_type: str = "gpu+optimized"
    """Value of the x-compute-type header."""
    compat_return_full_text: bool = True
    """POST /: the default of `return_full_text`; in TGI true for local models."""
    model_id: str = ""
    """The model's name in answers."""
    fingerprint: str = "native"
    """`system_fingerprint` of OpenAI answers: version and build."""
    max_client_batch_size: int = 4
    """The most prompts in one request."""
    cors_allow_origin: tuple[str, ...] = ()
    """Origins that browsers may call from; empty: any."""
    keep_alive_s: float = 15.0
    """Silence on a stream after which a comment is sent."""
    stall_s: float = 60.0
    """The connection of a client that reads nothing of its stream for so long is closed."""
    queue_timeout_s: float = 0.0
    """The longest wait in the queue, an upper bound of what requests ask for; 0: no bound."""
    request_timeout_s: float = 0.0
    """The longest time from a request's arrival to its end, an upper bound of what requests ask for; 0: no bound."""
    salt_per_tenant: bool = False
    """Keep tenants from sharing cached prompts."""
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    """Keys that clients must have; empty: none is needed."""
    vertex_predict_routes: tuple[str, ...] = ()
    """Further paths of the prediction route: Vertex AI's AIP_PREDICT_ROUTE."""
    vertex_health_routes: tuple[str, ...] = ()
    """Further paths of the health route: Vertex AI's AIP_HEALTH_ROUTE."""
