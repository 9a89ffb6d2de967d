"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's routes."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from aiohttp import web
from pydantic import Field

from text_generation_router.api.core.serving import Serving
from text_generation_router.api.http.fields import Name
from text_generation_router.web.bodies import Body, parse_body


class LoadAdapterBody(Body):
    """An adapter to load."""

    refused: ClassVar[Mapping[str, str]] = {"load_inplace": "Unload the adapter first", "is_3d_lora_weight": ""}

    lora_name: Annotated[Name, Field(min_length=1)]
    """Its name in requests."""
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Its folder on the machines of the shards, below --lora-modules-dir: absolute, or relative to that."""


class UnloadAdapterBody(Body):
    """An adapter to unload."""

    lora_name: Annotated[Name, Field(min_length=1)]
    """Its name in requests."""


class AdapterRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def load_lora_adapter(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/load_lora_adapter: load an adapter on all replicas, or on none.

        Needs --lora-modules-dir and, if there are API keys, one with `trust_headers`.
        """
        self._serving.check_operator(request)
        body = await parse_body(request, LoadAdapterBody)
        await self._serving.load_adapter(body.lora_name, body.lora_path)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_lora_adapter(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/unload_lora_adapter: take no new requests with an adapter; it is freed after the last one.

        Needs what /v1/load_lora_adapter needs.
        """
        self._serving.check_operator(request)
        body = await parse_body(request, UnloadAdapterBody)
        await self._serving.cluster.set_adapter(body.lora_name, None)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
