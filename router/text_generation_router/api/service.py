"""Routes about the service: /health, /info, /metrics, /tokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from aiohttp import hdrs, web

from text_generation_router.api.admission import Permits
from text_generation_router.api.bodies import parse_body
from text_generation_router.api.schemas import GenerateBody
from text_generation_router.api.settings import Settings
from text_generation_router.errors import InvalidRequest, Unhealthy
from text_generation_router.metrics import CONTENT_TYPE, Metrics
from text_generation_router.request import TokenId
from text_generation_router.text.tokenizer import Encoding, Tokenizer

RENDERED_INLINE = 16384
"""Longer texts' tokens are written down off the loop."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What /info says beyond the limits."""

    model_id: str
    version: str
    validation_workers: int
    max_client_batch_size: int
    model_sha: str | None = None
    model_pipeline_tag: str | None = None
    sha: str | None = None
    docker_label: str | None = None


class ServiceRoutes:
    """Handlers that generate nothing."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        permits: Permits,
        metrics: Metrics,
        healthy: Callable[[], bool],
        settings: Settings,
        info: ModelInfo,
    ) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._healthy = healthy
        self._info = orjson.dumps(_info(info, permits, settings))

    async def health(self, request: web.Request) -> web.StreamResponse:
        """GET /health, /ping and /: whether tokens can be produced."""
        if not self._healthy():
            raise Unhealthy
        return web.Response()

    async def info(self, request: web.Request) -> web.StreamResponse:
        """GET /info: what is served, and within which limits."""
        return web.Response(body=self._info, content_type="application/json")

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics."""
        return web.Response(body=self._metrics.exposition(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /tokenize: the prompt's tokens, and which bytes of the text each stands for."""
        text = (await parse_body(request, GenerateBody)).inputs
        try:
            encoding = await self._tokenizer.encode(text, add_special_tokens=True)
        except Exception as error:
            raise InvalidRequest(f"tokenizer error {error}") from error
        if len(text) <= RENDERED_INLINE:
            tokens = tokens_json(text, encoding)
        else:
            tokens = await asyncio.to_thread(tokens_json, text, encoding)
        return web.Response(body=tokens, content_type="application/json")


def tokens_json(text: str, encoding: Encoding) -> bytes:
    """The answer of /tokenize.

    The tokenizer counts characters, TGI counts bytes. A token that is part of a character stands for all of it.
    """
    tokens: list[bytes] = []
    at_character = at_byte = 0
    for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        if start == stop:  # added by the tokenizer
            tokens.append(_token(token_id, "", 0, 0))
            continue
        # Offsets all but always rise, so walking from the last one keeps this linear.
        if start >= at_character:
            at_byte += _bytes(text[at_character:start])
        else:
            at_byte -= _bytes(text[start:at_character])
        at_character = start
        piece = text[start:stop]
        tokens.append(_token(token_id, piece, at_byte, at_byte + _bytes(piece)))
    # One by one, because one call over half a million tokens would not let the event loop run.
    return b"[%b]" % b",".join(tokens)


def _token(token_id: TokenId, text: str, start: int, stop: int) -> bytes:
    return orjson.dumps({"id": token_id, "text": text, "start": start, "stop": stop})


def _bytes(text: str) -> int:
    return len(text.encode())


def _info(info: ModelInfo, permits: Permits, settings: Settings) -> dict[str, object]:
    limits = settings.limits
    return {
        "model_id": info.model_id,
        "model_sha": info.model_sha,
        "model_pipeline_tag": info.model_pipeline_tag,
        "max_concurrent_requests": permits.limit,
        "max_best_of": limits.max_best_of,
        "max_stop_sequences": limits.max_stop_sequences,
        "max_input_tokens": limits.max_input_tokens,
        "max_total_tokens": limits.max_total_tokens,
        "validation_workers": info.validation_workers,
        "max_client_batch_size": info.max_client_batch_size,
        "router": "text-generation-router",
        "version": info.version,
        "sha": info.sha,
        "docker_label": info.docker_label,
    }
