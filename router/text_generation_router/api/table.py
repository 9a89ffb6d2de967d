"""Every route there is, a line each: where it is, who answers, what it takes and what it says.

The server and its OpenAPI document are both made from this table.
"""

from __future__ import annotations

from text_generation_router.api.anthropic import answers as anthropic
from text_generation_router.api.anthropic.messages import MessagesRoutes
from text_generation_router.api.anthropic.schemas import CountTokensBody, MessagesBody
from text_generation_router.api.cloud.kserve import InferBody, KServeRoutes
from text_generation_router.api.cloud.sagemaker import InvocationBody, SageMakerRoutes
from text_generation_router.api.cloud.vertex import VertexBody, VertexRoutes
from text_generation_router.api.core.parameters import CompatGenerateBody, GenerateBody
from text_generation_router.api.core.settings import Settings
from text_generation_router.api.document import answers
from text_generation_router.api.http.dialects import Dialect
from text_generation_router.api.http.routes import GENERATING, Route
from text_generation_router.api.openai import answers as openai
from text_generation_router.api.openai.chat import ChatRoutes
from text_generation_router.api.openai.completions import CompletionRoutes
from text_generation_router.api.openai.responses import ResponsesRoutes
from text_generation_router.api.openai.responses_schemas import ResponsesBody
from text_generation_router.api.openai.schemas import ChatBody, ChatTokenizeBody, CompletionBody
from text_generation_router.api.tgi.generate import GenerateRoutes
from text_generation_router.api.tgi.service import ServiceRoutes
from text_generation_router.api.tgi.service_schemas import DetokenizeBody, TokenizeBody
from text_generation_router.errors import (
    BatchTooLarge,
    InvalidRequest,
    LengthMismatch,
    NoInstances,
    NotFound,
    NotUtf8,
    Overloaded,
    SuffixNotSupported,
    TemplateError,
    ToolError,
    Unhealthy,
)

CHATTING = (*GENERATING, TemplateError, ToolError)
"""How an answer to a conversation can fail."""
COMPLETING = (*GENERATING, BatchTooLarge, SuffixNotSupported)
TOKENIZING = (InvalidRequest, Overloaded)
TEMPLATING = (*TOKENIZING, TemplateError, ToolError, Unhealthy)


def service_routes(service: ServiceRoutes) -> list[Route]:
    """About the service."""
    return [
        Route("GET", "/", service.health, "Service", raises=(Unhealthy,), probe=True),
        Route("GET", "/health", service.health, "Service", raises=(Unhealthy,), probe=True),
        Route("GET", "/ping", service.health, "Service", raises=(Unhealthy,), probe=True),
        Route("GET", "/info", service.info, "Service", answer=answers.InfoAnswer),
        Route("GET", "/metrics", service.metrics, "Service", answer=str, content_type="text/plain"),
        Route("GET", "/tokenizer_info", service.tokenizer_info, "Service", answer=answers.TokenizerInfo),
        Route(
            "POST",
            "/detokenize",
            service.detokenize,
            "Service",
            body=DetokenizeBody,
            answer=answers.DetokenizeAnswer,
            raises=TOKENIZING,
        ),
    ]


def tgi_routes(generate: GenerateRoutes, chat: ChatRoutes, service: ServiceRoutes) -> list[Route]:
    """TGI's own."""
    return [
        Route(
            "POST",
            "/",
            generate.compat,
            "TGI",
            body=CompatGenerateBody,
            answer=list[answers.GenerateAnswer],
            events=answers.StreamEvent,
            raises=GENERATING,
        ),
        Route(
            "POST",
            "/generate",
            generate.generate,
            "TGI",
            body=GenerateBody,
            answer=answers.GenerateAnswer,
            raises=GENERATING,
        ),
        Route(
            "POST",
            "/generate_stream",
            generate.generate_stream,
            "TGI",
            body=GenerateBody,
            events=answers.StreamEvent,
            raises=GENERATING,
        ),
        Route(
            "POST",
            "/tokenize",
            service.tokenize,
            "TGI",
            body=TokenizeBody,
            answer=list[answers.SimpleToken] | answers.TokenIdsAnswer,
            raises=TOKENIZING,
        ),
        Route(
            "POST",
            "/chat_tokenize",
            chat.tokenize,
            "TGI",
            body=ChatTokenizeBody,
            answer=answers.ChatTokenizeAnswer,
            raises=TEMPLATING,
        ),
    ]


def openai_routes(
    chat: ChatRoutes, completions: CompletionRoutes, responses: ResponsesRoutes, service: ServiceRoutes
) -> list[Route]:
    """OpenAI's."""
    return [
        Route(
            "POST",
            "/v1/chat/completions",
            chat.chat,
            "OpenAI",
            body=ChatBody,
            answer=openai.ChatAnswer,
            events=openai.ChatChunk,
            raises=CHATTING,
        ),
        Route(
            "POST",
            "/v1/completions",
            completions.completions,
            "OpenAI",
            body=CompletionBody,
            answer=openai.CompletionAnswer,
            events=openai.CompletionAnswer,
            raises=COMPLETING,
        ),
        Route(
            "POST",
            "/v1/responses",
            responses.create,
            "OpenAI",
            body=ResponsesBody,
            answer=openai.ResponseAnswer,
            events=openai.ResponseEvent,
            raises=CHATTING,
        ),
        Route("GET", "/v1/responses/{id}", responses.stored, "OpenAI", raises=(NotFound,)),
        Route("DELETE", "/v1/responses/{id}", responses.stored, "OpenAI", raises=(NotFound,)),
        Route("GET", "/v1/models", service.models, "OpenAI", answer=answers.ModelsAnswer),
        Route(
            "GET", "/v1/models/{model:.+}", service.one_model, "OpenAI", answer=answers.ModelAnswer, raises=(NotFound,)
        ),
    ]


def anthropic_routes(messages: MessagesRoutes) -> list[Route]:
    """Anthropic's."""
    return [
        Route(
            "POST",
            "/v1/messages",
            messages.create,
            "Anthropic",
            body=MessagesBody,
            answer=anthropic.MessageAnswer,
            events=anthropic.MessageEvent,
            raises=CHATTING,
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "Anthropic",
            body=CountTokensBody,
            answer=anthropic.TokenCount,
            raises=TEMPLATING,
        ),
    ]


def cloud_routes(
    sagemaker: SageMakerRoutes, vertex: VertexRoutes, kserve: KServeRoutes, service: ServiceRoutes, settings: Settings
) -> list[Route]:
    """What cloud platforms call: SageMaker, Vertex AI, KServe."""
    model = "/v2/models/{name}/versions/{version}"
    return [
        Route(
            "POST",
            "/invocations",
            sagemaker.invoke,
            "SageMaker",
            body=InvocationBody,
            answer=list[answers.GenerateAnswer] | openai.ChatAnswer | openai.CompletionAnswer,
            events=answers.StreamEvent | openai.ChatChunk | openai.CompletionAnswer,
            speaks=(Dialect.TGI, Dialect.OPENAI),
            raises=(*CHATTING, BatchTooLarge, SuffixNotSupported),
        ),
        *(
            Route(
                "POST",
                path,
                vertex.predict,
                "Vertex AI",
                body=VertexBody,
                answer=answers.VertexAnswer,
                speaks=(Dialect.TGI,),
                raises=(*CHATTING, NoInstances),
            )
            for path in dict.fromkeys(("/vertex", *settings.vertex_predict_routes))
        ),
        *(
            Route("GET", path, service.health, "Vertex AI", raises=(Unhealthy,), probe=True)
            for path in settings.vertex_health_routes
            if path not in ("/", "/health", "/ping")
        ),
        Route("GET", "/v2", kserve.server, "KServe", answer=answers.ServerMetadata),
        Route("GET", "/v2/health/live", kserve.live, "KServe", answer=answers.LiveAnswer, probe=True),
        Route(
            "GET",
            "/v2/health/ready",
            kserve.ready,
            "KServe",
            answer=answers.LiveAnswer,
            raises=(Unhealthy,),
            probe=True,
        ),
        Route("GET", model, kserve.model, "KServe", answer=answers.ServerMetadata),
        Route(
            "GET",
            f"{model}/ready",
            kserve.ready,
            "KServe",
            answer=answers.LiveAnswer,
            raises=(Unhealthy,),
            probe=True,
        ),
        Route(
            "POST",
            f"{model}/infer",
            kserve.infer,
            "KServe",
            body=InferBody,
            answer=answers.InferAnswer,
            raises=(*GENERATING, NotUtf8, LengthMismatch),
        ),
    ]
