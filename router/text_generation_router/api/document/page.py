"""The OpenAPI document, and a page that shows it with Swagger UI.

Every file comes from this server, and the page's content security policy allows no other source.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
from aiohttp import hdrs, web

from text_generation_router.api.core.settings import Settings
from text_generation_router.api.document.openapi import document
from text_generation_router.api.http.bodies import JSON
from text_generation_router.api.http.routes import Handler, Route
from text_generation_router.errors import NotFound

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Text Generation Inference</title>
<link rel="icon" href="{folder}favicon-32x32.png">
<link rel="stylesheet" href="{folder}swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="{folder}swagger-ui-bundle.js"></script>
<script src="{folder}start.js"></script>
</body>
</html>
"""
_START = b"""SwaggerUIBundle({
  url: new URL("../api-doc/openapi.json", document.currentScript.src).href,
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
"""
_FILES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript", "favicon-32x32.png": "image/png"}
"""Files of Swagger UI that the page needs. They are in the package swagger-ui-py, which is never imported."""
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class DocsRoutes:
    """Handlers of the documentation."""

    def __init__(self) -> None:
        self._make: Callable[[], bytes] = bytes
        self._document: bytes | None = None
        self._making = asyncio.Lock()

    def describe(self, table: list[Route], settings: Settings) -> None:
        """Document `table`, which includes these routes."""
        keys = bool(settings.api_keys)
        self._make = lambda: orjson.dumps(document(table, settings.version, keys=keys))

    def routes(self) -> list[Route]:
        """The routes of the documentation."""
        return [
            *(
                Route("GET", path, self.openapi, "Documentation", name=name, answer=dict[str, Any])
                for name, path in (("openapi_as_in_tgi", "/api-doc/openapi.json"), ("openapi", "/openapi.json"))
            ),
            Route("GET", "/docs", self.page, "Documentation", name="docs", answer=str, content_type="text/html"),
            Route("GET", "/docs/", self.page, documented=False),
            Route("GET", "/docs/start.js", self.start, documented=False),
            *(Route("GET", f"/docs/{name}", _file(name), documented=False) for name in _FILES),
        ]

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        """GET /api-doc/openapi.json and /openapi.json: this document."""
        async with self._making:  # it takes half a second, which a start does not have
            if self._document is None:
                self._document = await asyncio.to_thread(self._make)
        return web.Response(body=self._document, content_type=JSON)

    async def page(self, request: web.Request) -> web.StreamResponse:
        """GET /docs: a page to read and to try this document."""
        page = _PAGE.format(folder="" if request.path.endswith("/") else "docs/")
        return web.Response(text=page, content_type="text/html", headers=_HEADERS)

    async def start(self, request: web.Request) -> web.StreamResponse:
        """GET /docs/start.js: the script of the page; the policy forbids inline scripts."""
        return web.Response(body=_START, content_type="text/javascript", headers=_HEADERS)


def _file(name: str) -> Handler:
    path = _swagger_ui() / name

    async def file(request: web.Request) -> web.StreamResponse:
        try:
            content = await asyncio.to_thread(path.read_bytes)
        except OSError:
            raise NotFound(f"{name} is not installed") from None
        return web.Response(
            body=content, content_type=_FILES[name], headers={**_HEADERS, hdrs.CACHE_CONTROL: "max-age=3600"}
        )

    return file


def _swagger_ui() -> Path:
    spec = find_spec("swagger_ui")
    folders = (spec and spec.submodule_search_locations) or ["swagger_ui"]
    return Path(folders[0]) / "static"
