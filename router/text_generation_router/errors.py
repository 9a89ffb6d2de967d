"""Every way a request can fail, with its stable word and its HTTP status.

    ServingError
    ├── InvalidRequest      validation              422   the client's to mend; no retry
    ├── Overloaded          overloaded              429   no place in the building; retry later
    ├── Draining            overloaded              503   this router is stopping; retry elsewhere
    ├── Unhealthy           healthcheck             503   /health only
    ├── GenerationFailed    generation              424   admitted, then failed: this sequence, its step or its shard
    └── IncompleteGeneration incomplete_generation  500   a stream ended without an end: a bug of ours

Texts and words are TGI's, which clients match on (`Input validation error: …`).
"""

from __future__ import annotations

from typing import ClassVar


class ServingError(Exception):
    """A failure a client is told of. `str()` is the text, complete with TGI's prefix."""

    error_type: ClassVar[str]
    status: ClassVar[int]
    prefix: ClassVar[str] = ""

    def __init__(self, message: str) -> None:
        super().__init__(self.prefix + message)


class InvalidRequest(ServingError):
    """The request breaks a validation rule."""

    error_type = "validation"
    status = 422
    prefix = "Input validation error: "


class Overloaded(ServingError):
    """As many requests are in the building as may be."""

    error_type = "overloaded"
    status = 429

    def __init__(self, message: str = "Model is overloaded") -> None:
        super().__init__(message)


class Draining(ServingError):
    """The router is stopping and takes nothing new."""

    error_type = "overloaded"
    status = 503

    def __init__(self, message: str = "The server is shutting down") -> None:
        super().__init__(message)


class Unhealthy(ServingError):
    """Tokens cannot be produced now."""

    error_type = "healthcheck"
    status = 503

    def __init__(self, message: str = "unhealthy") -> None:
        super().__init__(message)


class GenerationFailed(ServingError):
    """A request that was admitted could not be finished."""

    error_type = "generation"
    status = 424
    prefix = "Request failed during generation: "


class IncompleteGeneration(ServingError):
    """A request's stream ended without an end."""

    error_type = "incomplete_generation"
    status = 500

    def __init__(self, message: str = "Incomplete generation") -> None:
        super().__init__(message)
