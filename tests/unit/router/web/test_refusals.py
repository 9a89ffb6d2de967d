"""A flood of refusals leaves few log lines, and the number of those left out."""

from __future__ import annotations

import asyncio

from aiohttp.test_utils import make_mocked_request
from api_settings import api_metrics
from structlog.testing import capture_logs

from text_generation_router.api.http.record import Record, finish
from text_generation_router.web.refusals import MAX_REFUSALS_LOGGED, RefusalLimiter


async def test_refusals_are_limited_by_status_and_the_others_counted() -> None:
    metrics = api_metrics()
    limiter, request = RefusalLimiter(window_s=0.05), make_mocked_request("POST", "/generate")
    sent = {200: 300, 401: 300, 429: MAX_REFUSALS_LOGGED}

    def flood() -> None:
        for status, requests in sent.items():
            for _ in range(requests):
                finish(Record(), request, status, metrics, limiter)

    for _ in range(2):  # the second window begins anew
        with capture_logs() as logs:
            flood()
            async with asyncio.timeout(10):
                while logs[-1]["event"] != "refusals not logged":  # noqa: ASYNC110 - a log has no event
                    await asyncio.sleep(0.01)
        lines = [record["status"] for record in logs if record["event"] == "request finished"]
        assert {status: lines.count(status) for status in sent} == sent | {401: MAX_REFUSALS_LOGGED}
        [rest] = [record for record in logs if record["event"] == "refusals not logged"]
        assert (rest["status"], rest["requests"]) == (401, 300 - MAX_REFUSALS_LOGGED)
