"""The table of routes: method, path, handler, body, response, operations.

The server and its OpenAPI document are both made from it. To add a route, write a handler and its row here.
"""

from __future__ import annotations

from functools import partial

from text_generation_router.api.adapters import AdapterRoutes, LoadAdapterBody, UnloadAdapterBody
from text_generation_router.api.anthropic import events as anthropic
from text_generation_router.api.anthropic.messages import MessagesRoutes
from text_generation_router.api.anthropic.schemas import CountTokensBody, MessagesBody
from text_generation_router.api.cloud.kserve import InferAnswer, InferBody, KServeRoutes, LiveAnswer, ServerMetadata
from text_generation_router.api.cloud.sagemaker import InvocationBody, SageMakerRoutes
from text_generation_router.api.cloud.vertex import VertexAnswer, VertexBody, VertexRoutes
from text_generation_router.api.core.settings import Settings
from text_generation_router.api.core.tokens import ChatTokenizeAnswer, SimpleToken, TokenIdsAnswer
from text_generation_router.api.http.dialects import Dialect
from text_generation_router.api.http.routes import Route
from text_generation_router.api.models import ModelAnswer, ModelCard, ModelPage, ModelRoutes, ModelsAnswer
from text_generation_router.api.openai import answers as openai
from text_generation_router.api.openai.chat import ChatRoutes
from text_generation_router.api.openai.completions import CompletionRoutes
from text_generation_router.api.openai.responses import ResponsesRoutes
from text_generation_router.api.openai.responses_events import ResponseAnswer, ResponseEvent
from text_generation_router.api.openai.responses_schemas import ResponsesBody
from text_generation_router.api.openai.schemas import ChatBody, ChatTokenizeBody, CompletionBody
from text_generation_router.api.tgi import service as about
from text_generation_router.api.tgi.generate import GenerateRoutes
from text_generation_router.api.tgi.replies import GenerateAnswer, StreamEvent
from text_generation_router.api.tgi.schemas import CompatGenerateBody, GenerateBody
from text_generation_router.api.tgi.service import InfoRoutes
from text_generation_router.error_attributes import Operation

_CHAT = Operation.GENERATE | Operation.TEMPLATE


def service_routes(service: InfoRoutes, settings: Settings) -> list[Route]:
    """Routes about the service."""
    get, post = partial(Route, "GET", tag="Service"), partial(Route, "POST", tag="Service")
    probe = partial(get, operations=Operation.HEALTH, probe=True)
    return [
        probe("/", service.home),
        probe("/health", service.health),
        get("/health/live", service.live, probe=True),
        probe("/health/ready", service.ready),
        probe("/ping", service.health, name="ping"),
        get("/info", service.info, answer=about.InfoAnswer),
        get(
            "/metrics",
            service.metrics,
            answer=str,
            content_type="text/plain",
            probe=settings.config.open_metrics,
            always=True,
        ),
        get("/tokenizer_info", service.tokenizer_info, answer=about.TokenizerInfo),
        post(
            "/detokenize",
            service.detokenize,
            body=about.DetokenizeBody,
            answer=about.DetokenizeAnswer,
            operations=Operation.TOKENIZE,
        ),
    ]


def tgi_routes(generate: GenerateRoutes, chat: ChatRoutes, service: InfoRoutes) -> list[Route]:
    """TGI's routes."""
    post = partial(Route, "POST", tag="TGI")
    answering = partial(post, operations=Operation.GENERATE)
    return [
        answering(
            "/", generate.compat_generate, body=CompatGenerateBody, answer=list[GenerateAnswer], events=StreamEvent
        ),
        answering("/generate", generate.generate, body=GenerateBody, answer=GenerateAnswer),
        answering("/generate_stream", generate.generate_stream, body=GenerateBody, events=StreamEvent),
        post(
            "/tokenize",
            service.tokenize,
            body=about.TokenizeBody,
            answer=list[SimpleToken] | TokenIdsAnswer,
            operations=Operation.TOKENIZE,
        ),
        post(
            "/chat_tokenize",
            chat.chat_tokenize,
            body=ChatTokenizeBody,
            answer=ChatTokenizeAnswer,
            operations=Operation.TOKENIZE | Operation.TEMPLATE,
        ),
    ]


def openai_routes(
    chat: ChatRoutes, completions: CompletionRoutes, responses: ResponsesRoutes, models: ModelRoutes
) -> list[Route]:
    """OpenAI's routes; the list of models is Anthropic's too."""
    get, post = partial(Route, "GET", tag="OpenAI"), partial(Route, "POST", tag="OpenAI")
    find = partial(get, operations=Operation.FIND)
    both = (Dialect.OPENAI, Dialect.ANTHROPIC)
    return [
        post(
            "/v1/chat/completions",
            chat.chat_completions,
            body=ChatBody,
            answer=openai.ChatAnswer,
            events=openai.ChatChunk,
            operations=_CHAT,
        ),
        post(
            "/v1/completions",
            completions.completions,
            body=CompletionBody,
            answer=openai.CompletionAnswer,
            events=openai.CompletionAnswer,
            operations=Operation.GENERATE | Operation.COMPLETE,
        ),
        post(
            "/v1/responses",
            responses.create_response,
            body=ResponsesBody,
            answer=ResponseAnswer,
            events=ResponseEvent,
            operations=_CHAT,
        ),
        find("/v1/responses/{id}", responses.get_response),
        Route(
            "DELETE",
            "/v1/responses/{id}",
            responses.get_response,
            "OpenAI",
            name="delete_response",
            operations=Operation.FIND,
        ),
        get("/v1/models", models.list_models, answer=ModelsAnswer | ModelPage, speaks=both),
        find("/v1/models/{model:.+}", models.get_model, answer=ModelAnswer | ModelCard, speaks=both),
    ]


def adapter_routes(adapters: AdapterRoutes) -> list[Route]:
    """vLLM's routes that load and unload LoRA adapters."""
    operations = Operation.OPERATE | Operation.FIND
    post = partial(Route, "POST", tag="Adapters", answer=str, content_type="text/plain", operations=operations)
    return [
        post("/v1/load_lora_adapter", adapters.load_lora_adapter, body=LoadAdapterBody),
        post("/v1/unload_lora_adapter", adapters.unload_lora_adapter, body=UnloadAdapterBody),
    ]


def anthropic_routes(messages: MessagesRoutes) -> list[Route]:
    """Anthropic's routes."""
    post = partial(Route, "POST", tag="Anthropic")
    return [
        post(
            "/v1/messages",
            messages.create_message,
            body=MessagesBody,
            answer=anthropic.MessageAnswer,
            events=anthropic.MessageEvent,
            operations=_CHAT,
        ),
        post(
            "/v1/messages/count_tokens",
            messages.count_message_tokens,
            body=CountTokensBody,
            answer=anthropic.TokenCount,
            operations=Operation.TOKENIZE | Operation.TEMPLATE,
        ),
    ]


def cloud_routes(
    sagemaker: SageMakerRoutes, vertex: VertexRoutes, kserve: KServeRoutes, service: InfoRoutes, settings: Settings
) -> list[Route]:
    """Routes of cloud platforms: SageMaker, Vertex AI, KServe."""
    model = "/v2/models/{name}/versions/{version}"
    get, post = partial(Route, "GET", tag="KServe"), partial(Route, "POST", tag="KServe")
    ready = partial(get, answer=LiveAnswer, operations=Operation.HEALTH, probe=True)
    vertex_health = partial(Route, "GET", tag="Vertex AI", operations=Operation.HEALTH, probe=True)
    return [
        Route(
            "POST",
            "/invocations",
            sagemaker.invoke,
            "SageMaker",
            body=InvocationBody,
            answer=list[GenerateAnswer] | openai.ChatAnswer | openai.CompletionAnswer,
            events=StreamEvent | openai.ChatChunk | openai.CompletionAnswer,
            speaks=(Dialect.TGI, Dialect.OPENAI),
            operations=_CHAT | Operation.COMPLETE,
        ),
        *(
            Route(
                "POST",
                path,
                vertex.predict,
                "Vertex AI",
                name="predict" if path == "/vertex" else "predict_route",
                body=VertexBody,
                answer=VertexAnswer,
                speaks=(Dialect.TGI,),
                operations=_CHAT | Operation.PREDICT,
            )
            for path in dict.fromkeys(("/vertex", settings.config.aip_predict_route))
            if path
        ),
        *(
            vertex_health(path, service.health, name="vertex_health")
            for path in (settings.config.aip_health_route,)
            if path not in ("", "/", "/health", "/ping")
        ),
        get("/v2", kserve.server, name="kserve_server", answer=ServerMetadata),
        get("/v2/health/live", kserve.live, name="kserve_live", answer=LiveAnswer, probe=True),
        ready("/v2/health/ready", kserve.ready, name="kserve_ready"),
        get(model, kserve.model, name="kserve_model", answer=ServerMetadata),
        ready(f"{model}/ready", kserve.ready, name="kserve_model_ready"),
        post(
            f"{model}/infer",
            kserve.infer,
            name="kserve_infer",
            body=InferBody,
            answer=InferAnswer,
            operations=Operation.GENERATE | Operation.INFER,
        ),
    ]
