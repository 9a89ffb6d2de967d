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
from text_generation_router.api.core.settings import Settings
from text_generation_router.api.document import answers
from text_generation_router.api.http.dialects import Dialect
from text_generation_router.api.http.routes import Route
from text_generation_router.api.openai import answers as openai
from text_generation_router.api.openai.chat import ChatRoutes
from text_generation_router.api.openai.completions import CompletionRoutes
from text_generation_router.api.openai.responses import ResponsesRoutes
from text_generation_router.api.openai.responses_schemas import ResponsesBody
from text_generation_router.api.openai.schemas import ChatBody, ChatTokenizeBody, CompletionBody
from text_generation_router.api.tgi.generate import GenerateRoutes
from text_generation_router.api.tgi.schemas import CompatGenerateBody, GenerateBody
from text_generation_router.api.tgi.service import ServiceRoutes
from text_generation_router.api.tgi.service_schemas import DetokenizeBody, TokenizeBody
from text_generation_router.errors import Operation

_CHAT = Operation.GENERATE | Operation.TEMPLATE


def service_routes(service: ServiceRoutes) -> list[Route]:
    """About the service."""
    return [
        Route("GET", "/", service.health, "Service", operations=Operation.HEALTH, probe=True),
        Route("GET", "/health", service.health, "Service", operations=Operation.HEALTH, probe=True),
        Route("GET", "/ping", service.health, "Service", operations=Operation.HEALTH, probe=True),
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
            operations=Operation.TOKENIZE,
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
            operations=Operation.GENERATE,
        ),
        Route(
            "POST",
            "/generate",
            generate.generate,
            "TGI",
            body=GenerateBody,
            answer=answers.GenerateAnswer,
            operations=Operation.GENERATE,
        ),
        Route(
            "POST",
            "/generate_stream",
            generate.generate_stream,
            "TGI",
            body=GenerateBody,
            events=answers.StreamEvent,
            operations=Operation.GENERATE,
        ),
        Route(
            "POST",
            "/tokenize",
            service.tokenize,
            "TGI",
            body=TokenizeBody,
            answer=list[answers.SimpleToken] | answers.TokenIdsAnswer,
            operations=Operation.TOKENIZE,
        ),
        Route(
            "POST",
            "/chat_tokenize",
            chat.tokenize,
            "TGI",
            body=ChatTokenizeBody,
            answer=answers.ChatTokenizeAnswer,
            operations=Operation.TOKENIZE | Operation.TEMPLATE,
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
            operations=_CHAT,
        ),
        Route(
            "POST",
            "/v1/completions",
            completions.completions,
            "OpenAI",
            body=CompletionBody,
            answer=openai.CompletionAnswer,
            events=openai.CompletionAnswer,
            operations=Operation.GENERATE | Operation.COMPLETE,
        ),
        Route(
            "POST",
            "/v1/responses",
            responses.create,
            "OpenAI",
            body=ResponsesBody,
            answer=openai.ResponseAnswer,
            events=openai.ResponseEvent,
            operations=_CHAT,
        ),
        Route("GET", "/v1/responses/{id}", responses.stored, "OpenAI", operations=Operation.FIND),
        Route("DELETE", "/v1/responses/{id}", responses.stored, "OpenAI", operations=Operation.FIND),
        Route("GET", "/v1/models", service.models, "OpenAI", answer=answers.ModelsAnswer),
        Route(
            "GET",
            "/v1/models/{model:.+}",
            service.one_model,
            "OpenAI",
            answer=answers.ModelAnswer,
            operations=Operation.FIND,
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
            operations=_CHAT,
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "Anthropic",
            body=CountTokensBody,
            answer=anthropic.TokenCount,
            operations=Operation.TOKENIZE | Operation.TEMPLATE,
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
            operations=_CHAT | Operation.COMPLETE,
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
                operations=_CHAT | Operation.PREDICT,
            )
            for path in dict.fromkeys(("/vertex", *settings.vertex_predict_routes))
        ),
        *(
            Route("GET", path, service.health, "Vertex AI", operations=Operation.HEALTH, probe=True)
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
            operations=Operation.HEALTH,
            probe=True,
        ),
        Route("GET", model, kserve.model, "KServe", answer=answers.ServerMetadata),
        Route(
            "GET",
            f"{model}/ready",
            kserve.ready,
            "KServe",
            answer=answers.LiveAnswer,
            operations=Operation.HEALTH,
            probe=True,
        ),
        Route(
            "POST",
            f"{model}/infer",
            kserve.infer,
            "KServe",
            body=InferBody,
            answer=answers.InferAnswer,
            operations=Operation.GENERATE | Operation.INFER,
        ),
    ]
