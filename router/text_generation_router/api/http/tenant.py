"""The tenant of a request: that of its API key, or the one that a trusted caller names in a header."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from text_generation_router.api.http.keys import HOLDER, KeyHolder
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import TenantId

TENANT = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
LONGEST_TENANT = 128


def tenant_of(request: web.Request) -> TenantId:
    """Return the tenant of a request. Raises InvalidRequest for an invalid header."""
    return read_tenant(request.headers, request[HOLDER])


def read_tenant(headers: Mapping[str, str], holder: KeyHolder) -> TenantId:
    """Return the tenant that the headers of a request of `holder` name. Raises InvalidRequest."""
    if not holder.trusted:  # one tenant must not be able to pass for another
        return holder.tenant
    for name in TENANT:
        given = headers.get(name)
        if given is None:
            continue
        if len(given) > LONGEST_TENANT or not (given.isascii() and given.isprintable()):
            raise InvalidRequest(f"header `{name}` must have at most {LONGEST_TENANT} characters, of printable ASCII")
        return TenantId(given)
    return holder.tenant
