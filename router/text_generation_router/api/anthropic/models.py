"""GET /v1/models and /v1/models/{model} in Anthropic's form, for requests with its version header."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

from aiohttp import web

from text_generation_router.api.core.serving import Serving
from text_generation_router.api.http.bodies import ResponseBody, json_response
from text_generation_router.errors import InvalidRequest

MAX_PAGE, DEFAULT_PAGE = 1000, 20
"""Models of a page: Anthropic's own limits."""


class ModelCard(ResponseBody):
    """A served model, for Anthropic's clients."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """Time of the model's files."""
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(ResponseBody):
    """A page of the served models, for Anthropic's clients."""

    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ModelPageRoutes:
    """Handlers of the list of models for Anthropic's clients."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: a page of the names of the served model and its adapters."""
        names, has_more = page(list(self._serving.model_names), request.query)
        answer: ModelPage = {
            "data": [self._card(name) for name in names],
            "has_more": has_more,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }
        return json_response(answer)

    async def one_model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}: the served model, by any name that requests may give it."""
        return json_response(self._card(self._serving.listed_name(request.match_info["model"])))

    def _card(self, name: str) -> ModelCard:
        limits, created = self._serving.settings.limits, self._serving.settings.created
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%SZ}",
            "lifecycle": "active",
            "max_input_tokens": limits.max_input_tokens,
            "max_tokens": limits.max_total_tokens,
        }


def page(names: list[str], query: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return the names that `limit`, `after_id` and `before_id` select, and True if there are more.

    Raises InvalidRequest.
    """
    given = query.get("limit", str(DEFAULT_PAGE))
    limit = int(given) if given.isascii() and given.isdecimal() and len(given) <= len(str(MAX_PAGE)) else 0
    if not 0 < limit <= MAX_PAGE:
        raise InvalidRequest(f"`limit` must be >= 1 and <= {MAX_PAGE}. Given: {given[:32]!r}")
    for field in ("after_id", "before_id"):
        if field in query and query[field] not in names:
            raise InvalidRequest(f"`{field}` is no model of the list. Given: {query[field][:64]!r}")
    if "before_id" in query:
        before = names[: names.index(query["before_id"])]
        return before[-limit:], len(before) > limit
    if "after_id" in query:
        names = names[names.index(query["after_id"]) + 1 :]
    return names[:limit], len(names) > limit
