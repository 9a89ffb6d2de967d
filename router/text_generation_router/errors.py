"""Every way a request can fail, with its stable word and its HTTP status. What HTTP itself refuses (a route that is not
there, a body that is no JSON or of the wrong shape) never gets here: api/http answers it.

    ServingError
    ├── InvalidRequest      validation              422   the client's to mend; no retry
    │   ├── NotUtf8         utf8                    422   KServe: bytes of an input that are no text
    │   ├── LengthMismatch  length mismatch         422   KServe: not as many outputs as inputs
    │   ├── NoInstances     Input validation error  422   Vertex AI: nothing to predict
    │   └── ThreadNotSupported validation           422   Anthropic: only the new part of a conversation
    ├── TemplateError       template_error          422   the chat template is missing or refuses these messages
    ├── ToolError           tool_error              422   a tool that is not there, or tools and a grammar at once
    ├── BatchTooLarge       batch size exceeded     422   more prompts than one request may bring
    ├── SuffixNotSupported  suffix not supported    422
    ├── Unauthorized        unauthorized            401   no key, or a wrong one
    ├── NotFound            not_found               404   a model that is not served here
    ├── Overloaded          overloaded              429   no place in the building; retry later, Retry-After says when
    ├── Draining            overloaded              503   this router is stopping; retry elsewhere
    ├── Unhealthy           healthcheck             503   what a request needs does not work now: the shards, or a sandbox
    ├── DeadlineExceeded    timeout                 408   its time was over, in the queue or later
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
    details: ClassVar[dict[str, object] | None] = None
    """What Anthropic's clients are told beside the text."""

    def __init__(self, message: str) -> None:
        super().__init__(self.prefix + message)


class InvalidRequest(ServingError):
    """The request breaks a validation rule."""

    error_type = "validation"
    status = 422
    prefix = "Input validation error: "


class NotUtf8(InvalidRequest):
    """An input is no text."""

    error_type = "utf8"
    prefix = ""


class LengthMismatch(InvalidRequest):
    """There are not as many outputs as inputs."""

    error_type = "length mismatch"
    prefix = ""

    def __init__(self, message: str = "Inputs and outputs length mismatch") -> None:
        super().__init__(message)


class NoInstances(InvalidRequest):
    """There is nothing to predict."""

    error_type = "Input validation error"
    prefix = ""

    def __init__(self, message: str = "Input validation error") -> None:
        super().__init__(message)


class ThreadNotSupported(InvalidRequest):
    """A conversation is to be kept here, or to go on from what was kept: nothing is."""

    details: ClassVar[dict[str, object] | None] = {
        "error_code": "thread_unsupported_request",  # makes clients send it whole
        "unsupported": ["thread"],
    }

    def __init__(self) -> None:
        super().__init__("`thread` is not supported: messages are not stored. Send the whole `messages`")


class TemplateError(ServingError):
    """The messages cannot be made a prompt."""

    error_type = "template_error"
    status = 422
    prefix = "Template error: "


class ToolError(ServingError):
    """The tools asked for cannot be used."""

    error_type = "tool_error"
    status = 422
    prefix = "Tool error: "


class BatchTooLarge(ServingError):
    """More prompts than one request may bring."""

    error_type = "batch size exceeded"
    status = 422

    def __init__(self, limit: int) -> None:
        super().__init__(f"Number of prompts exceeds the maximum allowed batch size of {limit}")


class SuffixNotSupported(ServingError):
    """`suffix` was given."""

    error_type = "suffix not supported"
    status = 422

    def __init__(self) -> None:
        super().__init__("Suffix is not supported and can be achieved by preprocessing the prompt.")


class Unauthorized(ServingError):
    """The request carries no valid API key."""

    error_type = "unauthorized"
    status = 401

    def __init__(self, message: str = "Incorrect API key provided") -> None:
        super().__init__(message)


class NotFound(ServingError):
    """What the request names is not here."""

    error_type = "not_found"
    status = 404


class Overloaded(ServingError):
    """As many requests are in the building as may be, or as much work as may wait."""

    error_type = "overloaded"
    status = 429

    def __init__(self, message: str = "Model is overloaded", retry_after_s: float | None = None) -> None:
        """`retry_after_s`: the wait foreseen for a request that came now; None: nothing is known of it."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(ServingError):
    """The router is stopping and takes nothing new."""

    error_type = "overloaded"
    status = 503

    def __init__(self, message: str = "The server is shutting down") -> None:
        super().__init__(message)


class Unhealthy(ServingError):
    """Tokens cannot be produced, nor prompts or grammars be made ready for it, now."""

    error_type = "healthcheck"
    status = 503

    def __init__(self, message: str = "unhealthy") -> None:
        super().__init__(message)


class DeadlineExceeded(ServingError):
    """The request's time was over before its answer was whole."""

    error_type = "timeout"
    status = 408
    prefix = "Request timed out: "


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
