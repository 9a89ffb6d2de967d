"""The dashboard: a page without secrets, and a stream of events behind the key."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from http_stack import Stack, serve, until

from text_generation_router.api.dashboard import MAX_VIEWERS, MAX_VIEWERS_OF_TENANT
from text_generation_router.dashboard.feed import Feed
from text_generation_router.dashboard.samples import Samples
from text_generation_router.dashboard.state import Sample

KEYS = """
keys = [
  {key = "sk-operator", tenant = "operator", trust_headers = true},
  {key = "sk-tenant", tenant = "<b>search</b>"},
]
"""
OPERATOR, TENANT = ({"authorization": f"Bearer sk-{name}"} for name in ("operator", "tenant"))
MAX_PAGE_BYTES = 250_000


@asynccontextmanager
async def events(stack: Stack, headers: dict[str, str]) -> AsyncIterator[AsyncIterator[tuple[str, bytes]]]:
    """Names and data of the events."""
    async with stack.client.get("/dashboard/events", headers=headers | {"origin": "http://a.example"}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        assert "access-control-allow-origin" not in response.headers, "another page could read it"

        async def read() -> AsyncIterator[tuple[str, bytes]]:
            while name := await response.content.readline():
                yield name.decode().removeprefix("event: ").strip(), await response.content.readline()
                await response.content.readline()

        yield read()


async def first_two(stack: Stack, headers: dict[str, str]) -> list[dict[str, Any]]:
    async with events(stack, headers) as stream:
        found = [orjson.loads((await anext(stream))[1].removeprefix(b"data: ")) for _ in range(2)]
        return found


async def test_the_page_needs_no_key_and_its_events_do(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    async with serve(
        demo_model, settings={"api_keys_file": str(tmp_path / "keys.toml"), "shard_token": "sk-1"}
    ) as stack:
        total = 0
        async with stack.client.get("/dashboard/", headers={"accept-encoding": "identity"}) as response:
            assert response.url.path == "/dashboard"
            page = await response.text()
        for name in ("dashboard", *re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page)):
            async with stack.client.get(f"/{name}") as response:
                total += len(await response.read())
                assert response.status == 200
                policy = response.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                tag = response.headers["etag"]
            async with stack.client.get(f"/{name}", headers={"if-none-match": tag}) as response:
                assert response.status == 304
        assert total < MAX_PAGE_BYTES
        assert not re.search(r"https?://(?!www\.w3\.org)", page), "the page names another host"

        for headers in ({}, {"authorization": "Bearer no"}):
            async with stack.client.get("/dashboard/events", headers=headers) as response:
                assert response.status == 401

        async with stack.client.head("/dashboard/events", headers=OPERATOR) as response:
            assert (response.status, await response.read()) == (200, b"")

        text: dict[str, Any] = {"inputs": "Hello there", "parameters": {"max_new_tokens": 4}}
        async with stack.client.post("/generate", json=text, headers=TENANT) as response:
            assert response.status == 200
        text["parameters"] = {"max_new_tokens": 0}
        for _ in range(2):
            async with stack.client.post("/generate", json=text, headers=TENANT) as response:
                assert response.status == 422

        server, sample = await first_two(stack, OPERATOR)
        settings = {each["name"]: each["value"] for each in server["settings"]}
        assert (settings["shard_token"], settings["port"]) == ("***", 3000)
        assert "sk-" not in str(server)
        assert (sample["new_tokens"], sample["ended"]["refused"], sum(sample["first_token"])) == (4, 2, 1)
        assert sample["replicas"][0]["state"] == "serving"
        assert ":" in sample["replicas"][0]["address"]
        assert sample["replicas"][0]["looked_up_tokens"] == sample["looked_up_tokens"] > 0
        error = next(each for each in sample["errors"] if each["status"] == 422)
        assert (error["count"], error["route"], error["tenant"]) == (2, "/generate", "<b>search</b>")
        assert "`max_new_tokens` must be strictly positive" in error["text"]

        server, sample = await first_two(stack, TENANT)
        assert "settings" not in server
        assert not {"tenants", "errors"} & sample.keys()
        assert not {"address", "reason"} & sample["replicas"][0].keys()


async def test_without_the_dashboard_its_paths_are_unknown(demo_model: Path) -> None:
    async with serve(demo_model, settings={"dashboard": False}) as stack:
        for path in ("/dashboard", "/dashboard/events", "/dashboard/main.js"):
            async with stack.client.get(path) as response:
                assert response.status == 404


async def test_more_viewers_than_the_limit_are_refused(demo_model: Path) -> None:
    async with serve(demo_model) as stack, AsyncExitStack() as viewers:
        for _ in range(MAX_VIEWERS):
            await viewers.enter_async_context(stack.client.get("/dashboard/events"))
        async with stack.client.get("/dashboard/events") as response:
            assert (response.status, response.headers["retry-after"]) == (429, "60")


async def test_one_tenant_does_not_take_the_streams_of_others(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    async with serve(demo_model, settings={"api_keys_file": str(tmp_path / "keys.toml")}) as stack:
        async with AsyncExitStack() as viewers:
            for _ in range(MAX_VIEWERS_OF_TENANT):
                await viewers.enter_async_context(stack.client.get("/dashboard/events", headers=TENANT))
            for headers, status in ((TENANT, 429), (OPERATOR, 200)):
                async with stack.client.get("/dashboard/events", headers=headers) as response:
                    assert response.status == status
        await first_two(stack, TENANT)


class Seen:
    """A viewer that keeps what it is shown."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.closed = asyncio.Event()

    def show(self, sample: Sample) -> None:
        self.samples.append(sample)

    def close(self) -> None:
        self.closed.set()


async def test_all_viewers_get_one_sample_and_nothing_is_read_without_one() -> None:
    read: list[Sample] = []
    draining = False

    async def sample() -> Sample:
        read.append(Sample(time.monotonic(), b"%d" % len(read), b""))
        return read[-1]

    samples = Samples(sample, period_s=0.001)
    feeds = [Feed(samples.after, lambda: draining) for _ in range(2)]  # as in two HTTP workers
    viewers = [Seen() for _ in range(4)]
    with ExitStack() as watching:
        for number, viewer in enumerate(viewers):
            watching.enter_context(feeds[number % 2].watched_by(viewer))
        await until(lambda: min(len(viewer.samples) for viewer in viewers) >= 20)
        assert len(read) < 1.5 * max(len(viewer.samples) for viewer in viewers), "each has its own samples"
        late = Seen()
        with feeds[0].watched_by(late):
            assert late.samples == [viewers[0].samples[-1]], "the last one at once"
    taken, clock = len(read), Seen()
    with Feed(Samples(sample_of_nothing, period_s=0.001).after, lambda: False).watched_by(clock):
        await until(lambda: len(clock.samples) >= 5)
    assert len(read) == taken
    one = Seen()
    with feeds[0].watched_by(one):
        draining = True
        async with asyncio.timeout(5):
            await one.closed.wait()


async def sample_of_nothing() -> Sample:
    return Sample(time.monotonic(), b"", b"")
