"""The table of routes: method, path, handler, body, response, operations.

The server and its OpenAPI document are both made from it. To add a route, write a handler and its row here.
"""

from collections.abc import Callable
from functools import partial

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.api.adapters import AdapterRoutes, LoadAdapterBody, UnloadAdapterBody
from text_generation_router.api.anthropic import messages as anthropic
from text_generation_router.api.anthropic.messages import MessagesRoutes
from text_generation_router.api.anthropic.schemas import CountTokensBody, MessagesBody
from text_generation_router.api.cloud.kserve import InferAnswer, InferBody, KServeRoutes, LiveAnswer, ServerMetadata
from text_generation_router.api.cloud.sagemaker import InvocationBody, SageMakerRoutes
from text_generation_router.api.cloud.vertex import VertexAnswer, VertexBody, VertexRoutes
from text_generation_router.api.core.chat import ChatPreparer
from text_generation_router.api.core.serving import Serving
from text_generation_router.api.core.tokens import ChatTokenizeAnswer, SimpleToken, TokenIdsAnswer
from text_generation_router.api.dashboard import DashboardRoutes
from text_generation_router.api.document.page import DocsRoutes
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
from text_generation_router.chat.template_files import ChatTemplates
from text_generation_router.error_attributes import Operation
from text_generation_router.stats import Stats

_CHAT = Operation.GENERATE | Operation.TEMPLATE
_MODEL = "/v2/models/{name}/versions/{version}"


def route_table(
    serving: Serving,
    chats: ChatPreparer,
    stats: Stats,
    *,
    healthy: Callable[[], bool],
    model: pb.InfoResponse,
    templates: ChatTemplates,
) -> list[Route]:
    """Return all routes."""
    config = serving.settings.config
    generate, chat = GenerateRoutes(serving), ChatRoutes(serving, chats)
    completions, responses = CompletionRoutes(serving), ResponsesRoutes(serving, chats)
    messages, models, adapters = MessagesRoutes(serving, chats), ModelRoutes(serving), AdapterRoutes(serving)
    sagemaker, vertex = SageMakerRoutes(generate, chat, completions), VertexRoutes(serving, generate, chat)
    kserve = KServeRoutes(serving, generate, healthy)
    service = InfoRoutes(serving, stats, healthy, model, templates)

    get, post = partial(Route, "GET"), partial(Route, "POST")
    probe = partial(get, operations=Operation.HEALTH, probe=True)
    about_service, probe_service = partial(get, tag="Service"), partial(probe, tag="Service")
    metrics = partial(about_service, content_type="text/plain", probe=config.open_metrics, always=True)
    tokens = partial(post, operations=Operation.TOKENIZE)
    generating = partial(post, tag="TGI", operations=Operation.GENERATE)
    openai_chat = partial(post, tag="OpenAI", operations=_CHAT)
    completing = partial(post, tag="OpenAI", operations=Operation.GENERATE | Operation.COMPLETE)
    listing = partial(get, tag="OpenAI", speaks=(Dialect.OPENAI, Dialect.ANTHROPIC))
    adapting = partial(
        post, tag="Adapters", answer=str, content_type="text/plain", operations=Operation.OPERATE | Operation.FIND
    )
    anthropic_chat = partial(post, tag="Anthropic", operations=_CHAT, events=anthropic.MessageEvent)
    counting = partial(post, operations=Operation.TOKENIZE | Operation.TEMPLATE)
    count = partial(counting, tag="Anthropic")
    invoke = partial(post, tag="SageMaker", speaks=(Dialect.TGI, Dialect.OPENAI), operations=_CHAT | Operation.COMPLETE)
    predict = partial(post, tag="Vertex AI", speaks=(Dialect.TGI,), operations=_CHAT | Operation.PREDICT)
    about_kserve = partial(get, tag="KServe")
    kserve_ready = partial(probe, tag="KServe", answer=LiveAnswer)
    infer = partial(post, tag="KServe", operations=Operation.GENERATE | Operation.INFER)

    completion = openai.CompletionAnswer
    invoked = list[GenerateAnswer] | openai.ChatAnswer | completion
    streamed = StreamEvent | openai.ChatChunk | completion
    table = [
        probe_service("/", service.home),
        probe_service("/health", service.health),
        about_service("/health/live", service.live, probe=True),
        probe_service("/health/ready", service.ready),
        probe_service("/ping", service.health, name="ping"),
        about_service("/info", service.info, answer=about.InfoAnswer),
        metrics("/metrics", service.metrics, answer=str),
        about_service("/tokenizer_info", service.tokenizer_info, answer=about.TokenizerInfo),
        tokens("/detokenize", service.detokenize, about.DetokenizeBody, about.DetokenizeAnswer, tag="Service"),
        generating("/", generate.compat_generate, CompatGenerateBody, list[GenerateAnswer], StreamEvent),
        generating("/generate", generate.generate, GenerateBody, GenerateAnswer),
        generating("/generate_stream", generate.generate_stream, GenerateBody, events=StreamEvent),
        tokens("/tokenize", service.tokenize, about.TokenizeBody, list[SimpleToken] | TokenIdsAnswer, tag="TGI"),
        counting("/chat_tokenize", chat.chat_tokenize, ChatTokenizeBody, ChatTokenizeAnswer, tag="TGI"),
        openai_chat("/v1/chat/completions", chat.chat_completions, ChatBody, openai.ChatAnswer, openai.ChatChunk),
        completing("/v1/completions", completions.completions, CompletionBody, completion, completion),
        openai_chat("/v1/responses", responses.create_response, ResponsesBody, ResponseAnswer, ResponseEvent),
        listing("/v1/models", models.list_models, answer=ModelsAnswer | ModelPage),
        listing("/v1/models/{model:.+}", models.get_model, answer=ModelAnswer | ModelCard, operations=Operation.FIND),
        adapting("/v1/load_lora_adapter", adapters.load_lora_adapter, LoadAdapterBody),
        adapting("/v1/unload_lora_adapter", adapters.unload_lora_adapter, UnloadAdapterBody),
        anthropic_chat("/v1/messages", messages.create_message, MessagesBody, anthropic.MessageAnswer),
        count("/v1/messages/count_tokens", messages.count_message_tokens, CountTokensBody, anthropic.TokenCount),
        invoke("/invocations", sagemaker.invoke, InvocationBody, invoked, streamed),
        predict("/vertex", vertex.predict, VertexBody, VertexAnswer),
        about_kserve("/v2", kserve.server, name="kserve_server", answer=ServerMetadata),
        about_kserve("/v2/health/live", kserve.live, name="kserve_live", answer=LiveAnswer, probe=True),
        kserve_ready("/v2/health/ready", kserve.ready, name="kserve_ready"),
        about_kserve(_MODEL, kserve.model, name="kserve_model", answer=ServerMetadata),
        kserve_ready(f"{_MODEL}/ready", kserve.ready, name="kserve_model_ready"),
        infer(f"{_MODEL}/infer", kserve.infer, InferBody, InferAnswer, name="kserve_infer"),
    ]
    if (route := config.aip_predict_route) not in ("", "/vertex"):
        table.append(predict(route, vertex.predict, VertexBody, VertexAnswer, name="predict_route"))
    if (route := config.aip_health_route) not in ("", "/", "/health", "/ping"):
        table.append(probe(route, service.health, tag="Vertex AI", name="vertex_health"))
    if config.dashboard:
        table += DashboardRoutes(serving, stats, model).routes()
    table += DocsRoutes(table, serving.settings).routes()
    return table
