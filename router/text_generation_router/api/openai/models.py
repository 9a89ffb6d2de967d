"""GET /v1/models and /v1/models/{model} in OpenAI's form."""

from __future__ import annotations

from typing import Literal

from aiohttp import web

from text_generation_router.api.core.serving import Serving
from text_generation_router.api.http.bodies import ResponseBody, json_response


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


class ModelRoutes:
    """Handlers of the list of models for OpenAI's clients."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: the served model, by each of its names, and its adapters."""
        answer: ModelsAnswer = {"object": "list", "data": [self._listed(name) for name in self._serving.model_names]}
        return json_response(answer)

    async def one_model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}: the served model, by any name that requests may give it."""
        return json_response(self._listed(self._serving.listed_name(request.match_info["model"])))

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
