"""The dashboard: a page for operators, its files, and the stream of events that it shows.

The page and its files contain nothing of this server and need no key. The stream needs one, where there are keys. It names
other tenants, and shows errors, addresses and settings, only to a caller that may act for them: see `KeyHolder.trusted`.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import Any

from aiohttp import hdrs, web

from text_generation_common.effective import masked
from text_generation_common.exit_codes import first_error
from text_generation_common.waiting import background
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.api.core.serving import Serving
from text_generation_router.api.http.dialects import tgi_error_event
from text_generation_router.api.http.keys import HOLDER
from text_generation_router.api.http.routes import Route
from text_generation_router.dashboard.state import BUCKETS, event
from text_generation_router.errors import Overloaded, ServingError
from text_generation_router.request import TenantId
from text_generation_router.stats import PERIOD_S, Stats
from text_generation_router.web.sse import EventStream
from text_generation_router.web.static_files import static_file

MAX_VIEWERS = 32
"""Most streams of events at a time, of ordinary callers together, and of each one that may act for all tenants."""
MAX_VIEWERS_OF_TENANT = 8
"""Most streams of one ordinary caller."""

HISTORY_S = 1.0
"""Longest wait for the last hour."""

_POLICY = "require-trusted-types-for 'script'"


class DashboardRoutes:
    def __init__(self, serving: Serving, stats: Stats, model: pb.InfoResponse) -> None:
        self._serving = serving
        self._about = {"engine": model.engine, "dtype": model.dtype, "device": model.device.partition(":")[0]}
        self._stats = stats
        self._watching = Counter[TenantId]()

    def routes(self) -> list[Route]:
        folder = files("text_generation_router") / "dashboard" / "static"
        contents = {path.name: path.read_bytes() for path in folder.iterdir()}
        page = contents.pop("index.html")
        if self._serving.settings.api_keys:  # so that the page asks for a key before it is refused
            page = page.replace(b"<html ", b"<html data-key ", 1)
        self._page = static_file("index.html", page, _POLICY)
        return [
            Route(
                "GET",
                "/dashboard",
                self.page,
                tag="Service",
                name="dashboard",
                answer=str,
                content_type="text/html",
                public=True,
            ),
            Route("GET", "/dashboard/", _to_page, public=True, documented=False),
            Route("GET", "/dashboard/events", self.events, documented=False, same_origin=True),
            *(
                Route("GET", f"/dashboard/{name}", static_file(name, content, _POLICY), public=True, documented=False)
                for name, content in contents.items()
            ),
        ]

    async def page(self, request: web.Request) -> web.StreamResponse:
        """GET /dashboard: a page for operators that shows the state of the server, and a chat with its model."""
        return await self._page(request)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /dashboard/events: the server and its last hour once, then a sample of its state every second."""
        if request.method == hdrs.METH_HEAD:
            return web.Response(content_type="text/event-stream")
        holder = request[HOLDER]
        full = holder.trusted or not self._serving.settings.api_keys
        with self._counted(holder.tenant, full=full):
            begin = event("server", self._server() | (self._settings() if full else {}))
            # A scheduler process that hangs or is away has no history now: the page opens without it.
            with suppress(ServingError, TimeoutError):
                async with asyncio.timeout(HISTORY_S):
                    history = await self._stats.history()
                    begin += history.full if full else history.common
            stream = self._serving.stream(request, {}, tgi_error_event)
            stream.send(begin, counts=False)  # it is there at once, however fast the client reads
            try:
                async with background(self._show_samples(stream, full=full)):
                    return await stream.run()
            except ExceptionGroup as group:
                raise first_error(group) from None  # as if nothing ran beside it

    async def _show_samples(self, stream: EventStream, *, full: bool) -> None:
        """Send every sample until the server drains: no viewer holds it up."""
        at = 0.0
        while not self._serving.cluster.draining:
            try:
                # A scheduler process that hangs must not keep the viewers of a process that drains.
                async with asyncio.timeout(3 * PERIOD_S):
                    sample = await self._stats.sample_after(at)
            except TimeoutError:
                continue
            except ServingError:  # the scheduler process is away
                await asyncio.sleep(PERIOD_S)
                continue
            at = sample.at
            stream.send(sample.full if full else sample.common)
        stream.close()

    @contextmanager
    def _counted(self, tenant: TenantId, *, full: bool) -> Iterator[None]:
        """Count a stream inside the block. Raises Overloaded if there are too many."""
        limit, of_all = (MAX_VIEWERS, 0) if full else (MAX_VIEWERS_OF_TENANT, self._watching.total())
        if self._watching[tenant] >= limit or of_all >= MAX_VIEWERS:
            raise Overloaded(
                f"at most {MAX_VIEWERS} dashboards are served at a time, {MAX_VIEWERS_OF_TENANT} to an ordinary key",
                retry_after_s=60,
            )
        self._watching[tenant] += 1
        try:
            yield
        finally:
            self._watching[tenant] -= 1

    def _server(self) -> dict[str, Any]:
        """Return the properties of the server that do not change."""
        settings = self._serving.settings
        limits = settings.limits
        return {
            "model": settings.model_id,
            "version": settings.version,
            **self._about,
            "max_input_tokens": limits.max_input_tokens,
            "max_total_tokens": limits.max_total_tokens,
            "max_concurrent_requests": self._serving.permits.limit,
            "top_logprobs": 0 if "logprobs" in limits.unsupported else limits.max_top_n_tokens,
            "max_images": limits.max_images,
            "buckets": BUCKETS,
            "targets": {"token_gap": settings.config.target_itl_ms / 1e3},
        }

    def _settings(self) -> dict[str, Any]:
        """Return the settings; secrets are masked."""
        config = self._serving.settings.config
        values = masked(config)
        shown = [
            {"name": name, "value": values[name], "default": getattr(config, name) == config.default(name)}
            for name in type(config).model_fields
            if name not in config.without_variable()
        ]
        return {"settings": shown}


async def _to_page(request: web.Request) -> web.StreamResponse:
    """GET /dashboard/: to the page, wherever a proxy has put it."""
    return web.Response(status=308, headers={hdrs.LOCATION: "../dashboard"})
