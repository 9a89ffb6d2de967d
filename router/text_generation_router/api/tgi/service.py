"""Routes about the service: /health, /info, /metrics, /tokenize, /detokenize, /tokenizer_info."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from aiohttp import hdrs, web
from pydantic import AliasChoices, Field

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.api.core.parameters import check_token_ids
from text_generation_router.api.core.serving import Serving
from text_generation_router.api.core.tokens import answer_ids, answer_tokens
from text_generation_router.api.http.fields import TokenIds
from text_generation_router.api.http.keys import tenant_of
from text_generation_router.api.tgi.schemas import GenerateBody
from text_generation_router.chat.template_files import ChatTemplates
from text_generation_router.discovery.source import UNABLE
from text_generation_router.errors import Unhealthy
from text_generation_router.metrics import CONTENT_TYPE, OPENMETRICS
from text_generation_router.stats import Stats
from text_generation_router.web.bodies import (
    Body,
    ResponseBody,
    beside,
    json_response,
    parse_body,
    parse_json,
    validate,
)

TGI_VERSION = "3.3.7"
"""The last release of TGI, whose clients are served."""
_HOME = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>Text Generation Inference</title><h1>Text Generation Inference</h1><ul>{links}</ul></html>
"""
MAX_IDS = 1 << 18
"""Tokens that /detokenize takes."""

# ----------------------------------------------------------------------------------------------------------------- bodies


class PromptBody(Body):
    """Body of /tokenize in vLLM's form, which evaluation tools send."""

    prompt: str
    """The text."""
    add_special_tokens: bool = True
    """Include the tokens that the tokenizer puts around a text."""


TokenizeBody = GenerateBody | PromptBody
"""Body of /tokenize: TGI's, that of /generate (only `inputs` is used), or vLLM's with `prompt`."""


class DetokenizeBody(Body):
    """Body of /detokenize."""

    ids: TokenIds = Field(max_length=MAX_IDS, validation_alias=AliasChoices("ids", "tokens"))
    """The tokens; `tokens` is vLLM's name for them."""


# ---------------------------------------------------------------------------------------------------------------- answers


class DetokenizeAnswer(ResponseBody):
    """A text, under our name and under vLLM's, which evaluation tools read."""

    text: str
    prompt: str


class TokenizerInfo(ResponseBody):
    """Properties of the tokenizer, for clients that render and count themselves."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int


class PrefixCacheAnswer(ResponseBody):
    """Prompt tokens looked up and found in the prefix cache since start, and those in it now."""

    query_tokens: int
    hit_tokens: int
    hit_rate: float
    cached_tokens: int


class ShardAnswer(ResponseBody):
    """A shard that is a member."""

    replica: int
    address: str
    state: Literal["joining", "serving", "hung", "draining", "taken", "refused"]
    """taken: another router drives it; refused: it cannot join, for `reason`."""
    reason: str


class InfoAnswer(ResponseBody):
    """The model, the limits and the replicas."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    """Always null; present because TGI has it."""
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    token_logprobs: Literal["auto", "always", "never"]
    """Requests that get the log-probabilities of their tokens: see --token-logprobs. Not part of TGI."""
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    """A version of TGI, for clients that decide by it."""
    server_version: str
    """The version of this server. Not part of TGI."""
    sha: str | None
    """Always null; present because TGI has it."""
    docker_label: str | None
    model_dtype: str
    model_device_type: str
    """`cuda` or `cpu`."""
    engine: str
    """`tensorrt-llm`, `torch` or `echo`."""
    speculate: int
    """Most tokens that the torch engine drafts for a sequence in a step; 0: none. Not part of TGI."""
    unsupported: dict[str, str]
    """Parameters that the engine does not support, by their name in the shard's protocol, with the reason."""
    replicas: int
    replicas_serving: int
    shards: list[ShardAnswer]
    prefix_cache: PrefixCacheAnswer
    isolated: list[str]
    """Features and replicas that are not used any more after audits: see --audit-action."""


# --------------------------------------------------------------------------------------------------------------- handlers


class InfoRoutes:
    """Handlers that do not generate."""

    def __init__(
        self,
        serving: Serving,
        stats: Stats,
        healthy: Callable[[], bool],
        model: pb.InfoResponse,
        templates: ChatTemplates,
    ) -> None:
        self._tokenizer = serving.tokenizer_pool
        self._permits = serving.permits
        self._stats = stats
        self._healthy = healthy
        self._settings = serving.settings
        self._limits = limits = serving.settings.limits
        self._known_ids = replace(limits, vocab_size=min(limits.vocab_size, self._tokenizer.vocabulary))
        self._model, self._templates = model, templates
        self._cluster = serving.cluster

    async def health(self, request: web.Request) -> web.StreamResponse:
        """GET /health and /ping: readiness, as in TGI."""
        if not self._healthy():
            raise Unhealthy
        return web.Response()

    async def home(self, request: web.Request) -> web.StreamResponse:
        """GET /: readiness, as in TGI, with links for a browser.

        A browser, which accepts `text/html`, gets a page; the status is the same.
        """
        if "text/html" not in request.headers.get(hdrs.ACCEPT, ""):
            return await self.health(request)
        paths = ["docs", "info", "metrics", *(["dashboard"] if self._settings.config.dashboard else [])]
        links = "".join(f'<li><a href="{path}">/{path}</a></li>' for path in sorted(paths))
        status = 200 if self._healthy() else Unhealthy.status
        policy = {"content-security-policy": "default-src 'none'"}
        return web.Response(text=_HOME.format(links=links), content_type="text/html", status=status, headers=policy)

    async def live(self, request: web.Request) -> web.StreamResponse:
        """GET /health/live: 200 while the process answers, also while it drains. Its peers are told when it stops."""
        return web.Response(headers={UNABLE: "it stops"} if self._cluster.stopping else {})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """GET /health/ready: 200 if a replica serves and the server does not drain."""
        return await self.health(request)

    async def info(self, request: web.Request) -> web.StreamResponse:
        """GET /info: the model, the limits and the replicas."""
        config, limits = self._settings.config, self._limits
        cluster = await self._cluster.info()
        stats = cluster.stats
        answer: InfoAnswer = {
            "model_id": self._settings.model_id,
            "model_sha": config.revision,
            "model_pipeline_tag": None,
            "max_concurrent_requests": self._permits.limit,
            "max_best_of": limits.max_best_of,
            "max_stop_sequences": limits.max_stop_sequences,
            "max_input_tokens": limits.max_input_tokens,
            "max_total_tokens": limits.max_total_tokens,
            "token_logprobs": config.token_logprobs,
            "validation_workers": config.validation_workers,
            "max_client_batch_size": config.max_client_batch_size,
            "router": "text-generation-router",
            "version": TGI_VERSION,
            "server_version": self._settings.version,
            "sha": None,
            "docker_label": config.docker_label or None,
            # TGI had the next two up to version 2, and never the others.
            "model_dtype": self._model.dtype,
            "model_device_type": self._model.device.partition(":")[0],
            "engine": self._model.engine,
            "speculate": max(0, self._model.max_tokens_per_step - 1),
            "unsupported": dict(limits.unsupported),
            "replicas": stats.num_replicas,
            "replicas_serving": stats.serving_replicas,
            "shards": [
                {"replica": member.replica, "address": member.address, "state": member.state, "reason": member.reason}
                for member in cluster.members
            ],
            "prefix_cache": {
                "query_tokens": stats.prompt_tokens,
                "hit_tokens": stats.hit_tokens,
                "hit_rate": stats.hit_rate,
                "cached_tokens": stats.cached_blocks * stats.block_size,
            },
            "isolated": list(cluster.isolated),
        }
        return json_response(answer)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics: metrics in Prometheus' text format, or in OpenMetrics' if the client accepts that."""
        openmetrics = OPENMETRICS in request.headers.get(hdrs.ACCEPT, "")
        body = await self._stats.metrics(openmetrics=openmetrics)
        content_type = f"{OPENMETRICS}; version=1.0.0; charset=utf-8" if openmetrics else CONTENT_TYPE
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /tokenize: the tokens of a text, with the bytes that each stands for."""
        tenant = tenant_of(request)
        body = await parse_json(request, tokenize_body)
        if isinstance(body, GenerateBody):
            encoding = await self._tokenizer.encode(body.inputs, add_special_tokens=True, tenant=tenant)
            return await answer_tokens(request, body.inputs, encoding, self._tokenizer.slices)
        special = body.add_special_tokens
        ids = await self._tokenizer.encode_ids(body.prompt, add_special_tokens=special, tenant=tenant)
        return await answer_ids(request, ids, self._limits.max_total_tokens, self._tokenizer.slices)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /detokenize: the text of tokens, special ones included."""
        tenant = tenant_of(request)
        ids = (await parse_body(request, DetokenizeBody)).ids
        await beside(request, lambda: check_token_ids("ids", ids, self._known_ids))
        text = await self._tokenizer.decode(ids, tenant)
        answer: DetokenizeAnswer = {"text": text, "prompt": text}
        return json_response(answer)

    async def tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        """GET /tokenizer_info: special tokens, chat template and longest sequence."""
        tokens = self._templates.special_tokens
        answer: TokenizerInfo = {
            "bos_token": tokens.get("bos_token"),
            "eos_token": tokens.get("eos_token"),
            "pad_token": tokens.get("pad_token"),
            "chat_template": self._templates.default_text or None,
            "model_max_length": self._limits.max_total_tokens,
        }
        return json_response(answer)


def tokenize_body(value: object) -> TokenizeBody:
    """Validate a body of /tokenize in either form. Raises InvalidBody."""
    vllm = isinstance(value, dict) and "prompt" in value and "inputs" not in value
    return validate(value, PromptBody) if vllm else validate(value, GenerateBody)
