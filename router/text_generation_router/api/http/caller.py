"""What a request's headers say of its caller: who it is, how urgent, and until when it is of use.

    tenant      the API key that let it in, where there are several; else x-llm-d-inference-fairness-id
    priority    x-smg-priority
    deadlines   x-slo-ttft-ms: a hope, of the first token; x-queue-timeout-ms: of leaving the queue;
                x-request-timeout-ms, grpc-timeout: of the whole answer

The names are those of inference gateways (llm-d, the Gateway API's inference extension, SMG) and of gRPC, where they
have one. `x-llm-d-slo-tpot-ms` is not read: a step's time is the server's choice, not a request's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from text_generation_router.api.http.auth import ApiKeys
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import Priority, TenantId

TENANT = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
PRIORITY = "x-smg-priority"
FIRST_TOKEN = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
QUEUE_TIMEOUT = "x-queue-timeout-ms"
REQUEST_TIMEOUT = "x-request-timeout-ms"
GRPC_TIMEOUT = "grpc-timeout"
HEADERS = (*TENANT, PRIORITY, *FIRST_TOKEN, QUEUE_TIMEOUT, REQUEST_TIMEOUT, GRPC_TIMEOUT)
"""All that is read here."""

NOBODY = TenantId("")
"""Callers that nothing tells apart."""
LONGEST_TENANT = 128
MAX_TIMEOUT_S = 1e7
"""Four months: what is longer is a mistake."""

_MILLISECONDS = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
_GRPC = re.compile(r"([0-9]{1,8})([HMSmun])")
"""TimeoutValue and TimeoutUnit of gRPC over HTTP/2."""
_GRPC_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_PRIORITIES = {one.name.lower(): one for one in Priority}


@dataclass(frozen=True, slots=True)
class Caller:
    """What the headers say. Times in seconds of the monotonic clock; None: nothing."""

    arrived: float = 0.0
    tenant: TenantId = NOBODY
    priority: Priority | None = None
    first_token_by: float | None = None
    queue_by: float | None = None
    end_by: float | None = None


def read_caller(headers: Mapping[str, str], arrived: float, keys: ApiKeys) -> Caller:
    """The caller of a request that `keys` let in. Raises InvalidRequest for the first header that makes no sense."""
    return Caller(
        arrived,
        _tenant(headers, keys),
        _priority(headers),
        _deadline(arrived, _milliseconds(headers, FIRST_TOKEN)),
        _deadline(arrived, _milliseconds(headers, (QUEUE_TIMEOUT,))),
        _deadline(arrived, [*_milliseconds(headers, (REQUEST_TIMEOUT,)), *_grpc_timeout(headers)]),
    )


def in_range(seconds: float) -> bool:
    """Whether a timeout is one; NaN is not."""
    return 0 < seconds <= MAX_TIMEOUT_S


def _tenant(headers: Mapping[str, str], keys: ApiKeys) -> TenantId:
    if keys.several:
        # Who may only be told by the key cannot pass for somebody else.
        return TenantId(keys.holder(headers) or NOBODY)
    for name in TENANT:
        given = headers.get(name)
        if given is None:
            continue
        if len(given) > LONGEST_TENANT or not (given.isascii() and given.isprintable()):
            raise InvalidRequest(f"header `{name}` must have at most {LONGEST_TENANT} characters, of printable ASCII")
        return TenantId(given)
    return NOBODY


def _priority(headers: Mapping[str, str]) -> Priority | None:
    given = headers.get(PRIORITY)
    if given is None:
        return None
    if given.lower() not in _PRIORITIES:
        known = ", ".join(f"`{name}`" for name in _PRIORITIES)
        raise InvalidRequest(f"header `{PRIORITY}` must be one of {known}. Given: {given[:32]!r}")
    return _PRIORITIES[given.lower()]


def _milliseconds(headers: Mapping[str, str], names: Iterable[str]) -> list[float]:
    """The timeouts given under these names, in seconds."""
    timeouts = []
    for name in names:
        given = headers.get(name)
        if given is None:
            continue
        seconds = float(given) / 1e3 if _MILLISECONDS.fullmatch(given) else -1.0
        if not in_range(seconds):
            raise InvalidRequest(
                f"header `{name}` must be a number of milliseconds > 0 and <= {MAX_TIMEOUT_S * 1e3:.0f}."
                f" Given: {given[:32]!r}"
            )
        timeouts.append(seconds)
    return timeouts


def _grpc_timeout(headers: Mapping[str, str]) -> list[float]:
    given = headers.get(GRPC_TIMEOUT)
    if given is None:
        return []
    parts = _GRPC.fullmatch(given)
    seconds = int(parts[1]) * _GRPC_UNITS[parts[2]] if parts else -1.0
    if not in_range(seconds):
        raise InvalidRequest(
            f"header `{GRPC_TIMEOUT}` must be up to 8 digits and one of H, M, S, m, u, n, for > 0 and"
            f" <= {MAX_TIMEOUT_S:.0f} seconds. Given: {given[:32]!r}"
        )
    return [seconds]


def _deadline(arrived: float, timeouts: Iterable[float]) -> float | None:
    nearest = min(timeouts, default=None)
    return None if nearest is None else arrived + nearest
