"""The table of routes: method, path, handler, body, response, operations.

The server and its OpenAPI document are both made from it. To add a route, write a handler and its row here.
"""

from functools import partial

from text_generation_router.api.adapters import AdapterRoutes, LoadAdapterBody, UnloadAdapterBody
from text_generation_router.api.anthropic import messages as anthropic
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
    get, post = partial(Route, "GET", tag="Service"), partial(Route, "POST", tag="Service")
    probe = partial(get, operations=Operation.HEALTH, probe=True)
    metrics = partial(get, content_type="text/plain", probe=settings.config.open_metrics, always=True)
    tokens = partial(post, operations=Operation.TOKENIZE)
    return [
        probe("/", service.home),
        probe("/health", service.health),
        get("/health/live", service.live, probe=True),
        probe("/health/ready", service.ready),
        probe("/ping", service.health, name="ping"),
        get("/info", service.info, answer=about.InfoAnswer),
        metrics("/metrics", service.metrics, answer=str),
        get("/tokenizer_info", service.tokenizer_info, answer=about.TokenizerInfo),
        tokens("/detokenize", service.detokenize, about.DetokenizeBody, about.DetokenizeAnswer),
    ]


def tgi_routes(generate: GenerateRoutes, chat: ChatRoutes, service: InfoRoutes) -> list[Route]:
    post = partial(Route, "POST", tag="TGI")
    answering = partial(post, operations=Operation.GENERATE)
    tokens = partial(post, operations=Operation.TOKENIZE)
    chat_tokens = partial(post, operations=Operation.TOKENIZE | Operation.TEMPLATE)
    return [
        answering("/", generate.compat_generate, CompatGenerateBody, list[GenerateAnswer], StreamEvent),
        answering("/generate", generate.generate, GenerateBody, GenerateAnswer),
        answering("/generate_stream", generate.generate_stream, GenerateBody, events=StreamEvent),
        tokens("/tokenize", service.tokenize, about.TokenizeBody, list[SimpleToken] | TokenIdsAnswer),
        chat_tokens("/chat_tokenize", chat.chat_tokenize, ChatTokenizeBody, ChatTokenizeAnswer),
    ]


def openai_routes(
    chat: ChatRoutes, completions: CompletionRoutes, responses: ResponsesRoutes, models: ModelRoutes
) -> list[Route]:
    """OpenAI's routes; the list of models is Anthropic's too."""
    get, post = partial(Route, "GET", tag="OpenAI"), partial(Route, "POST", tag="OpenAI")
    chatting = partial(post, operations=_CHAT)
    completing = partial(post, operations=Operation.GENERATE | Operation.COMPLETE)
    find = partial(get, operations=Operation.FIND)
    both = (Dialect.OPENAI, Dialect.ANTHROPIC)
    completion = openai.CompletionAnswer
    return [
        chatting("/v1/chat/completions", chat.chat_completions, ChatBody, openai.ChatAnswer, openai.ChatChunk),
        completing("/v1/completions", completions.completions, CompletionBody, completion, completion),
        chatting("/v1/responses", responses.create_response, ResponsesBody, ResponseAnswer, ResponseEvent),
        get("/v1/models", models.list_models, answer=ModelsAnswer | ModelPage, speaks=both),
        find("/v1/models/{model:.+}", models.get_model, answer=ModelAnswer | ModelCard, speaks=both),
    ]


def adapter_routes(adapters: AdapterRoutes) -> list[Route]:
    operations = Operation.OPERATE | Operation.FIND
    post = partial(Route, "POST", tag="Adapters", answer=str, content_type="text/plain", operations=operations)
    return [
        post("/v1/load_lora_adapter", adapters.load_lora_adapter, LoadAdapterBody),
        post("/v1/unload_lora_adapter", adapters.unload_lora_adapter, UnloadAdapterBody),
    ]


def anthropic_routes(messages: MessagesRoutes) -> list[Route]:
    post = partial(Route, "POST", tag="Anthropic")
    chatting = partial(post, operations=_CHAT, events=anthropic.MessageEvent)
    count = partial(post, operations=Operation.TOKENIZE | Operation.TEMPLATE)
    return [
        chatting("/v1/messages", messages.create_message, MessagesBody, anthropic.MessageAnswer),
        count("/v1/messages/count_tokens", messages.count_message_tokens, CountTokensBody, anthropic.TokenCount),
    ]


def cloud_routes(
    sagemaker: SageMakerRoutes, vertex: VertexRoutes, kserve: KServeRoutes, service: InfoRoutes, settings: Settings
) -> list[Route]:
    config = settings.config
    model = "/v2/models/{name}/versions/{version}"
    get = partial(Route, "GET", tag="KServe")
    ready = partial(get, answer=LiveAnswer, operations=Operation.HEALTH, probe=True)
    infer = partial(Route, "POST", tag="KServe", operations=Operation.GENERATE | Operation.INFER)
    invoke = partial(
        Route, "POST", tag="SageMaker", speaks=(Dialect.TGI, Dialect.OPENAI), operations=_CHAT | Operation.COMPLETE
    )
    predict = partial(Route, "POST", tag="Vertex AI", speaks=(Dialect.TGI,), operations=_CHAT | Operation.PREDICT)
    vertex_health = partial(Route, "GET", tag="Vertex AI", operations=Operation.HEALTH, probe=True)
    invoked = list[GenerateAnswer] | openai.ChatAnswer | openai.CompletionAnswer
    streamed = StreamEvent | openai.ChatChunk | openai.CompletionAnswer
    routes = [
        invoke("/invocations", sagemaker.invoke, InvocationBody, invoked, streamed),
        predict("/vertex", vertex.predict, VertexBody, VertexAnswer),
        get("/v2", kserve.server, name="kserve_server", answer=ServerMetadata),
        get("/v2/health/live", kserve.live, name="kserve_live", answer=LiveAnswer, probe=True),
        ready("/v2/health/ready", kserve.ready, name="kserve_ready"),
        get(model, kserve.model, name="kserve_model", answer=ServerMetadata),
        ready(f"{model}/ready", kserve.ready, name="kserve_model_ready"),
        infer(f"{model}/infer", kserve.infer, InferBody, InferAnswer, name="kserve_infer"),
    ]
    if config.aip_predict_route not in ("", "/vertex"):
        route = config.aip_predict_route
        routes.append(predict(route, vertex.predict, VertexBody, VertexAnswer, name="predict_route"))
    if config.aip_health_route not in ("", "/", "/health", "/ping"):
        routes.append(vertex_health(config.aip_health_route, service.health, name="vertex_health"))
    return routes
