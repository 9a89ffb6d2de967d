"""The HTTP application: handlers, routes, middleware."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.api.adapters import AdapterRoutes
from text_generation_router.api.anthropic.messages import MessagesRoutes
from text_generation_router.api.cloud.kserve import KServeRoutes
from text_generation_router.api.cloud.sagemaker import SageMakerRoutes
from text_generation_router.api.cloud.vertex import VertexRoutes
from text_generation_router.api.core.chat import ChatPreparer
from text_generation_router.api.core.serving import Serving
from text_generation_router.api.dashboard import DashboardRoutes
from text_generation_router.api.document.page import DocsRoutes
from text_generation_router.api.http.keys import tenant_of
from text_generation_router.api.http.middleware import Cors, Gate, add_request_id, answering, end_preparation
from text_generation_router.api.http.routes import add_routes
from text_generation_router.api.http.spans import RequestSpans
from text_generation_router.api.models import ModelRoutes
from text_generation_router.api.openai.chat import ChatRoutes
from text_generation_router.api.openai.completions import CompletionRoutes
from text_generation_router.api.openai.responses import ResponsesRoutes
from text_generation_router.api.table import (
    adapter_routes,
    anthropic_routes,
    cloud_routes,
    openai_routes,
    service_routes,
    tgi_routes,
)
from text_generation_router.api.tgi.generate import GenerateRoutes
from text_generation_router.api.tgi.service import InfoRoutes
from text_generation_router.chat.template_files import ChatTemplates
from text_generation_router.stats import Stats
from text_generation_router.web.body_reader import BODIES, BodyReader

if TYPE_CHECKING:
    from text_generation_common.tracer import Tracer


def create_app(
    serving: Serving,
    chats: ChatPreparer,
    stats: Stats,
    *,
    healthy: Callable[[], bool],
    model: pb.InfoResponse,
    templates: ChatTemplates,
    tracer: "Tracer | None" = None,
) -> web.Application:
    """Return the application. Run it with `handler_cancellation=True`, so that a client that leaves ends its request."""
    settings, metrics = serving.settings, serving.metrics
    generate = GenerateRoutes(serving)
    chat = ChatRoutes(serving, chats)
    completions = CompletionRoutes(serving)
    service = InfoRoutes(serving, stats, healthy, model, templates)
    table = [
        *service_routes(service, settings),
        *tgi_routes(generate, chat, service),
        *openai_routes(chat, completions, ResponsesRoutes(serving, chats), ModelRoutes(serving)),
        *adapter_routes(AdapterRoutes(serving)),
        *anthropic_routes(MessagesRoutes(serving, chats)),
        *cloud_routes(
            SageMakerRoutes(generate, chat, completions),
            VertexRoutes(serving, generate, chat),
            KServeRoutes(serving, generate, healthy),
            service,
            settings,
        ),
    ]
    if settings.config.dashboard:
        table += DashboardRoutes(serving, stats, model).routes()
    table += DocsRoutes(table, settings).routes()

    app = web.Application(client_max_size=settings.config.payload_limit)
    app[BODIES] = BodyReader(settings.config.payload_limit, settings.body_s, serving.stage, tenant_of)
    rows = add_routes(app, table)
    gate = Gate([added for added, route in rows.items() if route.probe or route.always], serving.cluster)
    spans = None if tracer is None else RequestSpans(tracer, settings.model_id)
    keyless = [added for added, route in rows.items() if route.probe or route.public]
    cors = Cors(settings.config.cors_allow_origin, [added for added, route in rows.items() if route.same_origin])
    keys = settings.api_keys.middleware(keyless)
    app.middlewares.extend([answering(metrics, spans), gate.middleware, cors.middleware, keys])
    app.on_response_prepare.extend([end_preparation, cors.add_headers, add_request_id, gate.close_connection])
    return app
