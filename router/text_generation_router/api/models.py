"""GET /v1/models and /v1/models/{model}: in Anthropic's form for requests with its version header, else in OpenAI's."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

from aiohttp import web

from text_generation_router.api.core.serving import Serving
from text_generation_router.api.http.dialects import Dialect, dialect_of
from text_generation_router.errors import InvalidRequest
from text_generation_router.web.bodies import ResponseBody, json_response

MAX_PAGE, DEFAULT_PAGE = 1000, 20
"""Models of a page: Anthropic's own limits."""


class ModelAnswer(ResponseBody):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    """Time of the model's files, in seconds since 1970."""
    owned_by: str
    root: str
    """The model that computes it."""
    parent: str | None
    """The model that an adapter changes; null for the model itself."""
    max_model_len: int
    """The most tokens of a prompt and its answer; vLLM's name."""


class ModelsAnswer(ResponseBody):
    """The served models."""

    object: Literal["list"]
    data: list[ModelAnswer]


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


class ModelRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: the served model, by each of its names, and its adapters."""
        names = list(self._serving.model_names)
        if dialect_of(request) is not Dialect.ANTHROPIC:
            answer: ModelsAnswer = {"object": "list", "data": [self._listed(name) for name in names]}
            return json_response(answer)
        names, has_more = page(names, request.query)
        shown: ModelPage = {
            "data": [self._card(name) for name in names],
            "has_more": has_more,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }
        return json_response(shown)

    async def get_model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}: the served model, by any name that requests may give it."""
        name = self._serving.listed_name(request.match_info["model"])
        return json_response((self._card if dialect_of(request) is Dialect.ANTHROPIC else self._listed)(name))

    def _listed(self, name: str) -> ModelAnswer:
        settings = self._serving.settings
        base = settings.model_id
        return {
            "id": name,
            "object": "model",
            "created": settings.created,
            "owned_by": base,
            "root": base,
            "parent": base if name in self._serving.cluster.adapters else None,
            "max_model_len": settings.limits.max_total_tokens,
        }

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
            raise InvalidRequest(f"unknown model in `{field}`. Given: {query[field][:64]!r}")
    if "before_id" in query:
        before = names[: names.index(query["before_id"])]
        return before[-limit:], len(before) > limit
    if "after_id" in query:
        names = names[names.index(query["after_id"]) + 1 :]
    return names[:limit], len(names) > limit
