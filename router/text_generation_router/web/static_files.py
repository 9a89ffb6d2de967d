"""Static files of pages, which load nothing from other servers."""

from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import PurePath

from aiohttp import hdrs, web

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain",
}
_POLICY = (
    *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'"),
    *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
)


def static_file(name: str, content: bytes, *policies: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the handler of a file; `policies` are further directives of its content security policy."""
    tag = f'"{sha256(content).hexdigest()[:16]}"'
    content_type = _TYPES[PurePath(name).suffix]
    # Browsers ask each time whether the file has changed: files of two versions must not meet.
    headers: Mapping[str, str] = {
        "content-security-policy": "; ".join((*_POLICY, *policies)),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
        hdrs.ETAG: tag,
        hdrs.CACHE_CONTROL: "no-cache",
    }

    async def file(request: web.Request) -> web.StreamResponse:
        if request.headers.get(hdrs.IF_NONE_MATCH) == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, content_type=content_type, charset="utf-8", headers=headers)

    return file
