"""The request headers that every generating route reads, for the OpenAPI document: those of `api/http/caller.py`."""

from __future__ import annotations

from typing import Any

from text_generation_router.api.http.caller import (
    FIRST_TOKEN,
    GRPC_TIMEOUT,
    LONGEST_TENANT,
    MAX_TIMEOUT_S,
    PRIORITY,
    QUEUE_TIMEOUT,
    REQUEST_TIMEOUT,
    TENANT,
)
from text_generation_router.request import Priority

Json = dict[str, Any]

_MILLISECONDS = {"type": "integer", "minimum": 1, "maximum": int(MAX_TIMEOUT_S * 1e3)}
_TENANT = {"type": "string", "maxLength": LONGEST_TENANT, "pattern": "^[ -~]*$"}


def _header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


CALLER_HEADERS: Json = {
    one["name"]: one
    for one in (
        _header(TENANT[0], "Whom the request is for; counts where keys do not tell callers apart.", _TENANT),
        _header(TENANT[1], "The same by its older name.", _TENANT),
        _header(
            PRIORITY,
            "How urgent the request is; it wins over the body.",
            {"type": "string", "enum": [one.name.lower() for one in Priority]},
        ),
        _header(FIRST_TOKEN[0], "Milliseconds in which the first token is hoped for.", _MILLISECONDS),
        _header(FIRST_TOKEN[1], "The same by its other name.", _MILLISECONDS),
        _header(QUEUE_TIMEOUT, "Milliseconds the request may wait in the queue.", _MILLISECONDS),
        _header(REQUEST_TIMEOUT, "Milliseconds in which the answer must be whole.", _MILLISECONDS),
        _header(
            GRPC_TIMEOUT,
            "The same as gRPC writes it: digits and one of H, M, S, m, u, n.",
            {"type": "string", "pattern": "^[1-9][0-9]{0,6}[Smun]$|^[1-9][0-9]{0,2}[HM]$"},
        ),
    )
}
"""By name. The schemas promise no more than is taken: half a millisecond, say, is a timeout too."""
