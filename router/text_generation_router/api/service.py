"""Routes about the service: /health, /info, /metrics, /tokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import orjson
from aiohttp import hdrs, web

from text_generation_router.api.admission import Permits
from text_generation_router.api.bodies import parse_body
from text_generation_router.api.schemas import GenerateBody
from text_generation_router.api.settings import Settings
from text_generation_router.errors import InvalidRequest, ServingError, Unhealthy
from text_generation_router.metrics import CONTENT_TYPE, Metrics
from text_generation_router.text.tokenizer import Encoding, Tokenizer

CHUNK_TOKENS = 4096
"""Tokens written down at a time: a few milliseconds."""


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
        except ServingError:
            raise
        except Exception as error:
            raise InvalidRequest(f"tokenizer error {error}") from error
        chunks = tokens_json(text, encoding)
        if len(encoding.ids) <= CHUNK_TOKENS:
            return web.Response(body=b"".join(chunks), content_type="application/json")
        # Half a million tokens are tens of megabytes of JSON: written as they are made, they are never held whole.
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "application/json"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0)
        await response.write_eof()
        return response


def tokens_json(text: str, encoding: Encoding) -> Iterator[bytes]:
    """The answer of /tokenize, in pieces of CHUNK_TOKENS tokens.

    The tokenizer counts characters, TGI counts bytes. A token that is part of a character stands for all of it.
    """
    at_character = at_byte = 0
    before = b"["
    for first in range(0, len(encoding.ids), CHUNK_TOKENS):
        tokens: list[dict[str, object]] = []
        chunk = slice(first, first + CHUNK_TOKENS)
        for token_id, (start, stop) in zip(encoding.ids[chunk], encoding.offsets[chunk], strict=True):
            if start == stop:  # added by the tokenizer
                tokens.append({"id": token_id, "text": "", "start": 0, "stop": 0})
                continue
            # Offsets all but always rise, so walking from the last one keeps this linear.
            if start >= at_character:
                at_byte += _bytes(text[at_character:start])
            else:
                at_byte -= _bytes(text[start:at_character])
            at_character = start
            piece = text[start:stop]
            tokens.append({"id": token_id, "text": piece, "start": at_byte, "stop": at_byte + _bytes(piece)})
        yield before + orjson.dumps(tokens)[1:-1]
        before = b","
    yield b"[]" if not encoding.ids else b"]"


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
