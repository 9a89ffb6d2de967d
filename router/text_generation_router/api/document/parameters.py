"""The request headers of `api/http/caller.py`, for the OpenAPI document. Every generating route reads them."""

from __future__ import annotations

from typing import Any

from text_generation_router.api.http.caller import (
    FIRST_TOKEN,
    GRPC_TIMEOUT,
    MAX_TIMEOUT_S,
    PRIORITY,
    QUEUE_TIMEOUT,
    REQUEST_TIMEOUT,
)
from text_generation_router.api.http.tenant import LONGEST_TENANT, TENANT
from text_generation_router.request import Priority

Json = dict[str, Any]

_TIMEOUT = {"type": "integer", "minimum": 1, "maximum": int(MAX_TIMEOUT_S * 1e3)}
_TENANT = {"type": "string", "maxLength": LONGEST_TENANT, "pattern": "^[ -~]*$"}


def _header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


CALLER_HEADERS: Json = {
    header["name"]: header
    for header in (
        _header(TENANT[0], "The tenant of the request; used if callers have no keys of their own.", _TENANT),
        _header(TENANT[1], "The older name of the tenant header.", _TENANT),
        _header(
            PRIORITY,
            "The priority of the request; wins over the body's.",
            {"type": "string", "enum": [priority.name.lower() for priority in Priority]},
        ),
        _header(FIRST_TOKEN[0], "Milliseconds until the first token is wanted.", _TIMEOUT),
        _header(FIRST_TOKEN[1], "Another name of the header above.", _TIMEOUT),
        _header(QUEUE_TIMEOUT, "Milliseconds that the request may wait in the queue.", _TIMEOUT),
        _header(REQUEST_TIMEOUT, "Milliseconds until the answer must be whole.", _TIMEOUT),
        _header(
            GRPC_TIMEOUT,
            "The request timeout in gRPC's form: digits and one of H, M, S, m, u, n.",
            {"type": "string", "pattern": "^[0-9]{1,8}[HMSmun]$"},
        ),
    )
}
"""Headers by name. The server accepts more than the schemas promise, such as half a millisecond."""
