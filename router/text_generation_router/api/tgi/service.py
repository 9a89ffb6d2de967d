"""Routes about the service: /health, /info, /metrics, /v1/models, /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import orjson
from aiohttp import hdrs, web

from text_generation_router.api.core.admission import Permits
from text_generation_router.api.core.parameters import check_token_ids
from text_generation_router.api.core.settings import MODEL_ALIAS, Settings
from text_generation_router.api.core.tokens import answer_tokens
from text_generation_router.api.http.bodies import parse_body, parse_json
from text_generation_router.api.tgi.service_schemas import DetokenizeBody, PromptBody, tokenize_body
from text_generation_router.errors import NotFound, Unhealthy
from text_generation_router.metrics import CONTENT_TYPE, Metrics
from text_generation_router.text.tokenizer import Tokenizer, tokenizer_errors


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
    engine: str = ""
    """What computes: `tensorrt-llm`, `torch`, `echo`."""
    dtype: str = ""
    device_type: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of `bos_token` and its like."""
    chat_template: str | None = None

    @property
    def as_listed(self) -> dict[str, object]:
        """As OpenAI lists models; `created` is what TGI says."""
        return {"id": self.model_id, "object": "model", "created": 0, "owned_by": self.model_id}


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
        self._limits = settings.limits
        self._model = info
        self._info = _info(info, permits, settings)

    async def health(self, request: web.Request) -> web.StreamResponse:
        """GET /health, /ping and /: whether tokens can be produced."""
        if not self._healthy():
            raise Unhealthy
        return web.Response()

    async def info(self, request: web.Request) -> web.StreamResponse:
        """GET /info: what is served, and within which limits; how many replicas serve, and what they know by heart."""
        return _json(self._info | self._metrics.status())

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics."""
        return web.Response(body=self._metrics.exposition(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /tokenize: a text's tokens, and which bytes of the text each stands for."""
        body = tokenize_body(await parse_json(request))
        if isinstance(body, PromptBody):
            return await self._token_ids(body)
        text = body.inputs
        with tokenizer_errors():
            encoding = await self._tokenizer.encode(text, add_special_tokens=True)
        return await answer_tokens(request, text, encoding)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /detokenize: the text of tokens, special ones included.

        It has two names: `text`, ours, and `prompt`, vLLM's, which evaluation tools read.
        """
        ids = (await parse_body(request, DetokenizeBody)).ids
        check_token_ids("ids", ids, self._limits)
        with tokenizer_errors():
            text = await self._tokenizer.decode(ids)
        return _json({"text": text, "prompt": text})

    async def tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        """GET /tokenizer_info: what clients that write prompts themselves need to know."""
        tokens = self._model.special_tokens
        return _json(
            {
                "bos_token": tokens.get("bos_token"),
                "eos_token": tokens.get("eos_token"),
                "pad_token": tokens.get("pad_token"),
                "chat_template": self._model.chat_template,
                "model_max_length": self._limits.max_total_tokens,
            }
        )

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: the one model there is."""
        return _json({"object": "list", "data": [self._model.as_listed]})

    async def one_model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}: a model, if it is served; `tgi` is the one that is."""
        model_id = request.match_info["model"]
        if model_id not in (self._model.model_id, MODEL_ALIAS):
            raise NotFound(f"The model `{model_id}` does not exist")
        return _json(self._model.as_listed)

    async def _token_ids(self, body: PromptBody) -> web.Response:
        """As vLLM answers."""
        with tokenizer_errors():
            ids = await self._tokenizer.encode_ids(body.prompt, add_special_tokens=body.add_special_tokens)
        return _json({"count": len(ids), "max_model_len": self._limits.max_total_tokens, "tokens": ids})


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


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
        # TGI had these two up to its version 2, and never the others.
        "model_dtype": info.dtype,
        "model_device_type": info.device_type,
        "engine": info.engine,
        "unsupported": dict(limits.unsupported),
    }
