"""Every error that a client can receive: one class for each, with its status and its name in every dialect.

To add an error, define its class here and raise it. Responses, metrics, the OpenAPI document and the table in docs/api.md
follow from the class attributes. Texts and types are TGI's, because its clients match on them.

    ServingError
    ├── ClientError                      the client must change the request
    │   ├── BodyRejected …               while its body is read: web/body_errors.py
    │   └── InvalidRequest …             a validation rule is broken
    ├── Overloaded, Draining, CannotKeepUp, Unhealthy   refused now; a retry may succeed
    └── DeadlineExceeded, GenerationFailed, IncompleteGeneration, ClientLeft
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from text_generation_router.error_attributes import OPEN_STATUSES, Operation, Outcome, TgiBody

MAX_RETRY_AFTER_S = 3600.0
"""Upper bound of Retry-After. Estimates further ahead are not reliable."""
_NAMED = re.compile(r"`([\w.\[\]]+)`")


class ServingError(Exception):
    """An error that a client receives. `str()` is the full text.

    The defaults are those of an internal error.
    """

    status: ClassVar[int]
    """Status on TGI's routes."""
    open_status: ClassVar[int]
    """Status on OpenAI's and Anthropic's routes."""
    error_type: ClassVar[str]
    """TGI's `error_type`."""
    tgi_body: ClassVar[TgiBody] = TgiBody.JSON
    prefix: ClassVar[str] = ""
    """Prefix of the text, mostly TGI's."""
    tgi_prefix: ClassVar[str] = ""
    """Prefix of the text on TGI's routes only."""
    message: ClassVar[str] = "…"
    """The text where the raiser gives none, and the example in the OpenAPI document."""
    openai_type: ClassVar[str] = "server_error"
    openai_code: ClassVar[str | None]
    """Default: that of the base class, else `error_type` with underscores for spaces."""
    field: ClassVar[str | None] = None
    """The field that is wrong, if it is always the same."""
    responses_code: ClassVar[str] = "server_error"
    """`error.code` of a failed response in OpenAI's Responses API."""
    anthropic_type: ClassVar[str] = "api_error"
    anthropic_details: ClassVar[Mapping[str, object] | None] = None
    """Machine-readable details for Anthropic's clients."""
    headers: ClassVar[Mapping[str, str]] = {}
    """Fixed response headers."""
    closes_connection: ClassVar[bool] = False
    metric_label: ClassVar[str] = "incomplete"
    """Value of `err` in `tgi_request_failure`."""
    outcome: ClassVar[Outcome] = Outcome.REFUSED
    operations: ClassVar[Operation] = Operation.NONE
    """Operations that raise it."""

    retry_after_s: float | None = None
    """Seconds after which a retry is expected to succeed; None sends no Retry-After."""

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "error_type") and not hasattr(cls, "openai_code"):
            cls.openai_code = cls.error_type.replace(" ", "_")
        if hasattr(cls, "status"):
            cls.open_status = OPEN_STATUSES.get(cls.status, cls.status)

    def __init__(
        self,
        message: str | None = None,
        retry_after_s: float | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        """`retry_after_s`: estimated wait of a request that arrives now; None: that of the class.

        `param`: the field that is wrong, by default the one that the message begins with; `code`: OpenAI's, by default that
        of the class.
        """
        text = self.message if message is None else message
        super().__init__(self.prefix + text)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s
        named = _NAMED.match(text)
        self.param = param or self.field or (named and named[1])
        self.code = code or self.openai_code

    @property
    def openai_text(self) -> str:
        """The text on OpenAI's routes."""
        return str(self)

    @property
    def anthropic_text(self) -> str:
        """The text on Anthropic's routes."""
        return str(self)

    @property
    def retry_after(self) -> int | None:
        """Value of the Retry-After header, in whole seconds from 1 to MAX_RETRY_AFTER_S; None without a header."""
        if self.retry_after_s is None:
            return None
        return max(1, math.ceil(min(MAX_RETRY_AFTER_S, self.retry_after_s)))


def error_classes(base: type[ServingError] = ServingError) -> Iterator[type[ServingError]]:
    """Every error class that can be raised, in the order of definition, a base before its subclasses."""
    for error in base.__subclasses__():
        if hasattr(error, "status"):
            yield error
        yield from error_classes(error)


class ClientError(ServingError):
    """The request is wrong; repeating it unchanged fails again."""

    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"
    metric_label = "validation"


class Unauthorized(ClientError):
    """The request carries no valid API key."""

    status = 401
    error_type = "unauthorized"
    tgi_body = TgiBody.EMPTY
    message = "Incorrect API key provided"
    openai_code = "invalid_api_key"
    anthropic_type = "authentication_error"
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}


class NotFound(ClientError):
    """The named resource does not exist."""

    status = 404
    error_type = "not_found"
    anthropic_type = "not_found_error"
    operations = Operation.FIND


class ModelNotFound(NotFound):
    """The server has no model of this name."""

    openai_code = "model_not_found"
    field = "model"
    message = "The model `other` does not exist"
    operations = Operation.FIND | Operation.TEMPLATE | Operation.GENERATE


class UnknownRoute(NotFound):
    """No route has this path."""

    message = "GET /other is not served. See /docs"
    operations = Operation.NONE


class MethodNotAllowed(ClientError):
    """The route does not accept this method."""

    status = 405
    error_type = "method_not_allowed"
    message = "GET is not allowed here, only POST"


class InvalidRequest(ClientError):
    """The request breaks a validation rule."""

    status = 422
    error_type = "validation"
    openai_code: ClassVar[str | None] = "invalid_value"
    prefix = "Input validation error: "
    responses_code = "invalid_prompt"
    operations = Operation.GENERATE | Operation.TOKENIZE


class ContextLengthExceeded(InvalidRequest):
    """The prompt is too long.

    OpenAI's clients find this error by its code or its words, Anthropic's by its words; then they shorten the prompt.
    """

    openai_code = "context_length_exceeded"
    message = "`inputs` must have less than 1024 tokens. Given: 2000"
    operations = Operation.GENERATE

    def __init__(
        self,
        message: str | None = None,
        *,
        tokens: str = "2000",
        limit: int = 1024,
        context: int = 2048,
        param: str | None = None,
    ) -> None:
        """`tokens`: the length of the prompt; `limit`: its longest length in this request; `context`: with new tokens."""
        super().__init__(message, param=param)
        self._tokens, self._limit, self._context = tokens, limit, context

    @property
    def openai_text(self) -> str:
        limit = f"This model's maximum context length is {self._context} tokens"
        # The second sentence is the one that LangChain knows.
        return f"{self}. {limit}. Input tokens exceed the configured limit of {self._limit} tokens"

    @property
    def anthropic_text(self) -> str:
        # Clients read both numbers; `self` says where the first is a lower bound.
        tokens = self._tokens.removeprefix("at least ")
        return f"prompt is too long: {tokens} tokens > {self._limit} maximum. {self}"


class NotSupported(InvalidRequest):
    """The request asks for what this server does not have."""

    openai_code = "unsupported_parameter"


class ThreadNotSupported(InvalidRequest):
    """The request continues a stored conversation. None is stored."""

    message = "`thread` is not supported: messages are not stored. Send the whole `messages`"
    anthropic_details: ClassVar[Mapping[str, object] | None] = {
        "error_code": "thread_unsupported_request",  # the client then sends the whole conversation
        "unsupported": ["thread"],
    }
    operations = Operation.NONE


class TemplateError(ClientError):
    """The chat template cannot render the messages."""

    status = 422
    error_type = "template_error"
    field = "messages"
    prefix = "Template error: "
    metric_label = "template"
    operations = Operation.TEMPLATE


class ToolError(ClientError):
    """The tools of the request cannot be used."""

    status = 422
    error_type = "tool_error"
    field = "tools"
    prefix = "Tool error: "
    metric_label = "tool"
    operations = Operation.TEMPLATE


class GrammarFailed(ClientError):
    """The grammar takes too long to follow, or leaves no token; found after the request was admitted."""

    status = 422
    error_type = "grammar_error"
    prefix = "Grammar error: "
    metric_label = "generation"
    outcome = Outcome.ERROR
    operations = Operation.GENERATE


class BatchTooLarge(ClientError):
    """The request has more prompts than allowed."""

    status = 422
    error_type = "batch size exceeded"
    field = "prompt"
    prefix = "Number of prompts exceeds the maximum allowed batch size of "
    operations = Operation.COMPLETE


class SuffixNotSupported(ClientError):
    """`suffix` is not supported."""

    status = 422
    error_type = "suffix not supported"
    openai_code = "unsupported_parameter"
    field = "suffix"
    message = "Suffix is not supported and can be achieved by preprocessing the prompt."
    operations = Operation.COMPLETE


class Overloaded(ServingError):
    """Too many requests run or wait."""

    status = 429
    error_type = "overloaded"
    message = "Model is overloaded"
    openai_type = "rate_limit_error"
    responses_code = "rate_limit_exceeded"
    anthropic_type = "rate_limit_error"
    metric_label = "overloaded"
    operations = Operation.GENERATE | Operation.TOKENIZE
    retry_after_s = 1.0  # permits become free all the time


class RateLimited(Overloaded):
    """The API key's limit of requests or tokens a minute is reached."""

    message = "the API key's limit of 600 requests a minute is reached"
    openai_code = "rate_limit_exceeded"


class Draining(ServingError):
    """The server is shutting down."""

    status = 503
    error_type = "overloaded"
    message = "The server is shutting down"
    anthropic_type = "overloaded_error"
    metric_label = "overloaded"
    operations = Operation.ANY
    retry_after_s = 1.0  # another server can answer at once
    closes_connection = True  # the next request then goes to another server


class TooManyConnections(Draining):
    """All connections of the server are in use."""

    message = "Too many connections"


class CannotKeepUp(ServingError):
    """The server is too slow for the work it accepted. The fault is not the client's."""

    status = 503
    error_type = "overloaded"
    message = "The server cannot keep up"
    anthropic_type = "overloaded_error"
    metric_label = "overloaded"
    operations = Operation.GENERATE | Operation.TOKENIZE
    retry_after_s = 1.0


class Unhealthy(ServingError):
    """A part that the request needs is unavailable: the shards or a worker process."""

    status = 503
    error_type = "healthcheck"
    message = "unhealthy"
    anthropic_type = "overloaded_error"
    metric_label = "generation"
    operations = Operation.GENERATE | Operation.TEMPLATE | Operation.HEALTH
    retry_after_s = 5.0  # about the restart time of a shard


class DeadlineExceeded(ServingError):
    """The deadline of the request passed before the response was complete."""

    status = 408
    error_type = "timeout"
    prefix = "Request timed out: "
    openai_type = "timeout"
    anthropic_type = "timeout_error"
    # OpenAI's and Anthropic's clients would otherwise retry a request whose deadline is over.
    headers: ClassVar[Mapping[str, str]] = {"x-should-retry": "false"}
    metric_label = "timeout"
    outcome = Outcome.EXPIRED
    operations = Operation.GENERATE


class GenerationFailed(ServingError):
    """The request failed after it was admitted."""

    status = 424
    error_type = "generation"
    prefix = "Request failed during generation: "
    metric_label = "generation"
    outcome = Outcome.ERROR
    operations = Operation.GENERATE


class IncompleteGeneration(ServingError):
    """Internal error: the generation ended without a result."""

    status = 500
    error_type = "incomplete_generation"
    message = "Incomplete generation"
    outcome = Outcome.ERROR
    operations = Operation.GENERATE


class ClientLeft(ServingError):
    """The client closed the connection before the response was complete. Logged and counted, never sent."""

    status = 499  # as nginx logs it
    error_type = "dropped"
    metric_label = "dropped"
    outcome = Outcome.CANCELLED
