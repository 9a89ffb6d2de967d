"""The OpenAPI document, and a page that shows it with Swagger UI.

Every file comes from this server, and the page's content security policy allows no other source.
"""

import asyncio
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from text_generation_router.api.core.settings import Settings
from text_generation_router.api.document.openapi import document
from text_generation_router.api.http.routes import Route
from text_generation_router.web.bodies import JSON
from text_generation_router.web.static_files import static_file

_FOLDER = files("text_generation_router") / "api" / "document"
_FILES = ("swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png")
"""Files of Swagger UI that the page needs. They are in the package swagger-ui-py, which is never imported."""


class DocsRoutes:
    def __init__(self, table: list[Route], settings: Settings) -> None:
        """`table`: the documented routes, to which these are added."""
        self._table = table
        self._settings = settings
        self._document: bytes | None = None
        self._making = asyncio.Lock()
        page = (_FOLDER / "index.html").read_text(encoding="utf-8")
        self._pages = [static_file("index.html", page.format(folder=folder).encode()) for folder in ("docs/", "")]
        """For /docs and for /docs/."""

    def routes(self) -> list[Route]:
        folder = _swagger_ui()
        paths = [_FOLDER / "start.js", *(folder / name for name in _FILES)]
        documentation = partial(Route, "GET", tag="Documentation")
        return [
            *(
                documentation(path, self.openapi, name=name, answer=dict[str, Any])
                for name, path in (("openapi_as_in_tgi", "/api-doc/openapi.json"), ("openapi", "/openapi.json"))
            ),
            documentation("/docs", self.page, name="docs", answer=str, content_type="text/html"),
            Route("GET", "/docs/", self.page, documented=False),
            *(
                Route("GET", f"/docs/{path.name}", static_file(path.name, path.read_bytes()), documented=False)
                for path in paths
            ),
        ]

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        """GET /api-doc/openapi.json and /openapi.json: this document."""
        async with self._making:  # it takes half a second, which a start does not have
            if self._document is None:
                keys = bool(self._settings.api_keys)
                made = await asyncio.to_thread(document, self._table, self._settings.version, keys=keys)
                self._document = orjson.dumps(made)
        return web.Response(body=self._document, content_type=JSON)

    async def page(self, request: web.Request) -> web.StreamResponse:
        """GET /docs: a page to read and to try this document."""
        return await self._pages[request.path.endswith("/")](request)


def _swagger_ui() -> Path:
    spec = find_spec("swagger_ui")
    folders = (spec and spec.submodule_search_locations) or ["swagger_ui"]
    return Path(folders[0]) / "static"
