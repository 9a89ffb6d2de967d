"""Attributes of error classes: the operations that raise them, the outcome that is counted, the form of the body."""

from enum import Enum, Flag, auto

OPEN_STATUSES = {422: 400, 424: 500}
"""Statuses of OpenAI's and Anthropic's routes where TGI's differ: TGI's → theirs. Their clients know no 422 and no 424."""


class Operation(Flag):
    """The operations of a route. The OpenAPI document derives the errors of a route from them."""

    NONE = 0
    HEALTH = auto()
    FIND = auto()
    TOKENIZE = auto()
    TEMPLATE = auto()
    """Render a chat template."""
    GENERATE = auto()
    COMPLETE = auto()
    """OpenAI's completions: several prompts in one request."""
    PREDICT = auto()
    """Vertex AI."""
    INFER = auto()
    """KServe."""
    OPERATE = auto()
    """Change the server."""
    ANY = auto()
    """Every route but probes and /metrics."""


class Outcome(Enum):
    """The end of a failed generation: the values of `reason` in `text_generation_requests_finished_total`."""

    REFUSED = "refused"
    """Rejected before it was queued."""
    ERROR = "error"
    """Queued, but not finished."""
    EXPIRED = "expired"
    """Ended by its deadline."""
    CANCELLED = "cancelled"
    """The client left before the response was complete."""


class TgiBody(Enum):
    """Form of an error on TGI's routes."""

    JSON = "JSON"
    TEXT = "plain text"
    """The form of TGI's web framework, which answers before TGI's own code runs."""
    EMPTY = "empty"
