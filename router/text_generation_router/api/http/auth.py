"""Who may call: API keys, asked for on every route but the probes, unknown routes included, before a body is read.

What is exempt is decided by the route that was found, never by the path as it was written: `//health`, `/v1/../health`
and `/%68ealth` are exempt exactly where they lead to a probe.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from hashlib import sha256

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from text_generation_router.errors import Unauthorized

X_API_KEY = "x-api-key"
"""Where Anthropic's clients put the key."""
_SCHEME = "bearer "


class ApiKeys:
    """The keys that let a request in; none: everything is let in. Only their digests are kept."""

    def __init__(self, keys: Collection[str] = ()) -> None:
        """Raises ValueError, without the key in it, for one that no header can carry."""
        if not all(key.isascii() and key.isprintable() and key and " " not in key for key in keys):
            raise ValueError("an API key must be made of visible ASCII characters")
        self._digests = tuple(dict.fromkeys(_digest(key) for key in keys))
        self._names = tuple(dict.fromkeys(_name(key) for key in keys))

    def __bool__(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._digests)

    @property
    def several(self) -> bool:
        """Whether keys tell callers apart."""
        return len(self._digests) > 1

    def admit(self, headers: Mapping[str, str]) -> bool:
        """Whether the headers carry a key, as `Authorization: Bearer <key>` or `x-api-key: <key>`, case and all."""
        return self.holder(headers) is not None

    def holder(self, headers: Mapping[str, str]) -> str | None:
        """Who holds the key that the headers carry: a name made of the key, from which it cannot be read. It is the same
        on every server and after every restart. None: there is no key, or a wrong one."""
        authorization = headers.get(hdrs.AUTHORIZATION, "")
        holder = None
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            holder = self._holder(authorization[len(_SCHEME) :])
        if holder is None and (key := headers.get(X_API_KEY)) is not None:
            holder = self._holder(key)
        return holder

    def middleware(self, exempt: Collection[web.AbstractRoute]) -> Middleware:
        """Refuses what no key comes with, but on the routes `exempt`. Raises Unauthorized."""
        exempt = frozenset(exempt)

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not self._digests or request.match_info.route in exempt or self.admit(request.headers):
                return await handler(request)
            raise Unauthorized

        return check

    def _holder(self, key: str) -> str | None:
        # The time a wrong key takes tells nothing: digests are compared, in constant time, and always with every key.
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        return self._names[matches.index(True)] if True in matches else None


def _name(key: str) -> str:
    # Of other bytes than the digest that keys are judged by: a name stands in logs, and must open nothing.
    return sha256(b"tenant " + key.encode()).hexdigest()[:16]


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()
