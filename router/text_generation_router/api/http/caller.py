"""The client of a request, and the quality of service that its headers and its body ask for.

    tenant      x-llm-d-inference-fairness-id of a trusted caller, else the tenant of the API key: see `tenant`
    priority    x-smg-priority, at most the key's
    deadlines   x-slo-ttft-ms: target for the first token; x-queue-timeout-ms: for leaving the queue;
                x-request-timeout-ms, grpc-timeout: for the complete response
    job         the session: SESSION, the headers of Claude Code, Codex, opencode and others, else fields of the body

The names are those of inference gateways (llm-d, the Gateway API's inference extension, SMG) and of gRPC, where they
have one. `x-llm-d-slo-tpot-ms` is not read: the time per step is a setting of the server, not of a request.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from text_generation_router.api.http.fields import WHOLE, Float32, ModelName, Name
from text_generation_router.api.http.keys import ANYONE, TENANT, KeyHolder, read_tenant
from text_generation_router.config import RouterConfig
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import DEFAULT_TENANT, Priority, QualityOfService, TenantId
from text_generation_router.scheduling.queue import due_time
from text_generation_router.web.bodies import Body

PRIORITY = "x-smg-priority"
FIRST_TOKEN = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
QUEUE_TIMEOUT = "x-queue-timeout-ms"
REQUEST_TIMEOUT = "x-request-timeout-ms"
GRPC_TIMEOUT = "grpc-timeout"
SESSION = ("x-claude-code-session-id", "x-opencode-session", "session_id", "session-id", "x-session-id")
HEADERS = (*TENANT, PRIORITY, *FIRST_TOKEN, QUEUE_TIMEOUT, REQUEST_TIMEOUT, GRPC_TIMEOUT, *SESSION)
"""Every header that `read_caller` reads."""

MAX_TIMEOUT_S = 1e7
"""Four months; a longer timeout is taken for a mistake."""
MAX_SALT_LENGTH = 256
MAX_JOB_LENGTH = 256
"""Characters of the name of a job that count, the last ones: clients put the session at the end."""

_MILLISECONDS = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
_GRPC = re.compile(r"([0-9]{1,8})([HMSmun])")
"""TimeoutValue and TimeoutUnit of gRPC over HTTP/2."""
_GRPC_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_PRIORITIES = {priority.name.lower(): priority for priority in Priority}
_TIERS = {"priority": Priority.INTERACTIVE, "flex": Priority.BULK}
"""OpenAI's tiers other than the default. Every other word (`auto`, Anthropic's `standard_only`) means the default."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request. Deadlines are times of the monotonic clock, in seconds; None: no deadline."""

    arrived: float = 0.0
    holder: KeyHolder = ANYONE
    tenant: TenantId = DEFAULT_TENANT
    priority: Priority | None = None
    first_token_by: float | None = None
    queue_by: float | None = None
    end_by: float | None = None
    job: str = ""
    """The session that the headers name."""


def read_caller(headers: Mapping[str, str], arrived: float, holder: KeyHolder) -> Caller:
    """Read the headers of a request of `holder`. Raises InvalidRequest for the first invalid header."""
    return Caller(
        arrived,
        holder,
        read_tenant(headers, holder),
        _priority(headers),
        _deadline(headers, arrived, *FIRST_TOKEN),
        _deadline(headers, arrived, QUEUE_TIMEOUT),
        _deadline(headers, arrived, REQUEST_TIMEOUT, GRPC_TIMEOUT),
        next((headers[name] for name in SESSION if headers.get(name)), ""),
    )


def in_range(seconds: float) -> bool:
    """Return True if `seconds` is a valid timeout; NaN is not."""
    return 0 < seconds <= MAX_TIMEOUT_S


def _priority(headers: Mapping[str, str]) -> Priority | None:
    given = headers.get(PRIORITY)
    if given is None:
        return None
    if given.lower() not in _PRIORITIES:
        known = ", ".join(f"`{name}`" for name in _PRIORITIES)
        raise InvalidRequest(f"header `{PRIORITY}` must be one of {known}. Given: {given[:32]!r}")
    return _PRIORITIES[given.lower()]


def _deadline(headers: Mapping[str, str], arrived: float, *names: str) -> float | None:
    """The earliest deadline that the headers of these names set."""
    return min((arrived + _seconds(name, headers[name]) for name in names if name in headers), default=None)


def _seconds(name: str, given: str) -> float:
    """The timeout in a header."""
    if name == GRPC_TIMEOUT:
        parts = _GRPC.fullmatch(given)
        seconds = int(parts[1]) * _GRPC_UNITS[parts[2]] if parts else -1.0
        rule = f"up to 8 digits and one of H, M, S, m, u, n, for > 0 and <= {MAX_TIMEOUT_S:.0f} seconds"
    else:
        seconds = float(given) / 1e3 if _MILLISECONDS.fullmatch(given) else -1.0
        rule = f"a number of milliseconds > 0 and <= {MAX_TIMEOUT_S * 1e3:.0f}"
    if not in_range(seconds):
        raise InvalidRequest(f"header `{name}` must be {rule}. Given: {given[:32]!r}")
    return seconds


class QosFields(Body):
    """Base of the bodies of generating routes: fields that every dialect takes beside its own."""

    queue_timeout: float | None = None
    """Seconds from its arrival that the request may wait in the queue; then it fails with 408."""
    timeout: float | None = None
    """Seconds from its arrival until the answer must be whole; then it fails with 408, or its stream with an error."""
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    """vLLM's: below 0 it is served sooner, above 0 later than by default."""
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_LENGTH)] | None = None
    """Prompts share cached computation only with prompts of the same salt."""

    @property
    def asked_priority(self) -> Priority | None:
        if self.priority is None:
            return None
        if self.priority < 0:
            return Priority.INTERACTIVE
        return Priority.BULK if self.priority > 0 else Priority.DEFAULT

    @property
    def named_job(self) -> str:
        """The session or the user that the body names; "": none."""
        return ""


class TieredFields(QosFields):
    """The same fields for dialects that have service tiers."""

    service_tier: Name | None = None
    """`priority` is served sooner, `flex` later; any other word means the default."""

    @property
    def asked_priority(self) -> Priority | None:
        asked = super().asked_priority
        return _TIERS.get(self.service_tier or "") if asked is None else asked


class OpenFields(TieredFields):
    """Fields of every generating body of OpenAI's and Anthropic's dialects."""

    model: ModelName | None = None
    """The name of the model or of an adapter, as /v1/models lists it, or `tgi`. Any other is rejected."""
    stream: bool | None = None
    """Answer as server-sent events."""
    temperature: Float32 | None = None
    """0 takes the most probable token; default: 1."""
    top_p: Float32 | None = None
    """Keep the smallest set of most probable tokens whose probabilities reach this sum."""
    prompt_cache_key: Name | None = None
    """The session: its requests are charged together, and it has one share of the tenant's. A header that names one goes first."""
    session_id: Name | None = None
    """vLLM's: the same."""

    @property
    def named_job(self) -> str:
        return self.prompt_cache_key or self.session_id or ""


def quality_of_service(
    caller: Caller, config: RouterConfig, *parts: QosFields, separate_tenants: bool = False
) -> QualityOfService:
    """Return the quality of service of a request; `parts` of its body may ask for one.

    deadlines    the earliest one counts; the operator's are defaults and upper bounds
    priority     the header's, then the body's, then the default; at most that of the caller's key. A target for the first
                 token is worth no more than that priority
    job          the session of the headers, else the session or the user of the body. It orders the tenant's own requests only
    salt         the body's, prefixed with the tenant's name where tenants must not share cached prompts

    The first part that sets a field wins. Raises InvalidRequest.
    """
    priorities = (caller.priority, *(part.asked_priority for part in parts), Priority.DEFAULT)
    salt = next((part.cache_salt for part in parts if part.cache_salt is not None), "")
    queue = (*_timeouts("queue_timeout", parts), config.queue_timeout)
    whole = (*_timeouts("timeout", parts), config.request_timeout)
    most_urgent = caller.holder.max_priority
    first_token_by = caller.first_token_by
    if first_token_by is not None:
        first_token_by = max(first_token_by, due_time(QualityOfService(priority=most_urgent), caller.arrived))
    return QualityOfService(
        tenant=caller.tenant,
        priority=max(most_urgent, next(priority for priority in priorities if priority is not None)),
        # A header cannot contain NUL, so two tenants never have the same salt.
        salt=f"{caller.tenant}\0{salt}" if separate_tenants else salt,
        first_token_by=first_token_by,
        queue_by=_earliest(caller.queue_by, caller.arrived, queue),
        end_by=_earliest(caller.end_by, caller.arrived, whole),
        job=(caller.job or next((part.named_job for part in parts if part.named_job), ""))[-MAX_JOB_LENGTH:],
    )


def _timeouts(name: str, parts: Iterable[QosFields]) -> Iterator[float]:
    for part in parts:
        given: float | None = getattr(part, name)
        if given is None:
            continue
        if not in_range(given):
            raise InvalidRequest(f"`{name}` must be > 0 and <= {MAX_TIMEOUT_S:.0f} seconds. Given: {given:g}")
        yield given


def _earliest(deadline: float | None, arrived: float, timeouts: tuple[float, ...]) -> float | None:
    """Return the earliest deadline. A timeout of 0 means none."""
    deadlines = [arrived + timeout for timeout in timeouts if timeout]
    return min(deadlines if deadline is None else [deadline, *deadlines], default=None)
