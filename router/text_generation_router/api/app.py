"""The HTTP API, put together: which route is whose, and what is around them all."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from text_generation_router.api.admission import Admission, Permits
from text_generation_router.api.bodies import expect_continue
from text_generation_router.api.generate import GenerateRoutes
from text_generation_router.api.middleware import Cors, answering
from text_generation_router.api.service import ModelInfo, ServiceRoutes
from text_generation_router.api.settings import Settings
from text_generation_router.generation import Generations
from text_generation_router.metrics import Metrics
from text_generation_router.text.tokenizer import Tokenizer


def create_app(
    *,
    generations: Generations,
    tokenizer: Tokenizer,
    permits: Permits,
    metrics: Metrics,
    healthy: Callable[[], bool],
    settings: Settings,
    info: ModelInfo,
) -> web.Application:
    """The application. Run it with `handler_cancellation=True`: a client that leaves must end its request."""
    cors = Cors(settings.cors_allow_origin)
    app = web.Application(client_max_size=settings.payload_limit, middlewares=[answering(metrics), cors.middleware()])
    app.on_response_prepare.append(cors.mark)

    admission = Admission(tokenizer, settings.limits, metrics)
    generate = GenerateRoutes(generations, tokenizer, admission, permits, metrics, settings)
    service = ServiceRoutes(tokenizer, permits, metrics, healthy, settings, info)
    for path, handler in (
        ("/", generate.compat),
        ("/generate", generate.generate),
        ("/generate_stream", generate.generate_stream),
        ("/tokenize", service.tokenize),
    ):
        app.router.add_post(path, handler, expect_handler=expect_continue)
    for path, handler in (
        ("/", service.health),
        ("/health", service.health),
        ("/ping", service.health),
        ("/info", service.info),
        ("/metrics", service.metrics),
    ):
        app.router.add_get(path, handler)
    return app
