"""The dashboard: a page without secrets, and a stream of events behind the key."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from http_stack import Stack, serve, until

from text_generation_common.waiting import background
from text_generation_router.api.dashboard import MAX_VIEWERS, MAX_VIEWERS_OF_TENANT
from text_generation_router.stats import OwnStats

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


async def shown(stack: Stack, headers: dict[str, str], *names: str) -> list[dict[str, Any]]:
    """The first events with these names, in their order."""
    found = []
    async with events(stack, headers) as stream:
        for name in names:
            async for given, data in stream:
                if given == name:
                    found.append(orjson.loads(data.removeprefix(b"data: ")))
                    break
    return found


async def sample_with(stack: Stack, headers: dict[str, str], holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first sample that a condition holds for."""
    async with asyncio.timeout(20), events(stack, headers) as stream:
        async for name, data in stream:
            sample = orjson.loads(data.removeprefix(b"data: "))
            if name == "sample" and holds(sample):
                return cast("dict[str, Any]", sample)
    raise AssertionError("the stream ended")


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
            status, content, given = await stack.ask(f"/{name}")
            total += len(content.encode())
            assert status == 200
            assert "default-src 'none'" in given["content-security-policy"]
            assert "unsafe" not in given["content-security-policy"]
            assert (await stack.ask(f"/{name}", headers={"if-none-match": given["etag"]})).status == 304
        assert total < MAX_PAGE_BYTES
        assert not re.search(r"https?://(?!www\.w3\.org)", page), "the page names another host"

        for headers in ({}, {"authorization": "Bearer no"}):
            assert (await stack.ask("/dashboard/events", headers=headers)).status == 401
        assert (await stack.ask("/dashboard/events", headers=OPERATOR, method="HEAD"))[:2] == (200, "")

        for tokens, status in ((4, 200), (0, 422), (0, 422)):
            text = {"inputs": "Hello there", "parameters": {"max_new_tokens": tokens}}
            assert (await stack.ask("/generate", text, TENANT)).status == status

        [server] = await shown(stack, OPERATOR, "server")
        sample = await sample_with(stack, OPERATOR, lambda sample: sum(sample["first_token"]) == 1)
        settings = {each["name"]: each["value"] for each in server["settings"]}
        assert (settings["shard_token"], settings["port"]) == ("***", 3000)
        assert "sk-" not in str(server)
        assert (sample["new_tokens"], sample["ended"]["refused"], sum(sample["first_token"])) == (4, 2, 1)
        assert sample["replicas"][0]["state"] == "serving"
        assert ":" in sample["replicas"][0]["address"]
        assert sample["replicas"][0]["looked_up_tokens"] == sample["looked_up_tokens"] > 0
        error = next(each for each in sample["errors"] if each["status"] == 422)
        assert (error["count"], error["route"], error["tenants"]) == (2, "/generate", ["<b>search</b>"])
        assert "`max_new_tokens` must be strictly positive" in error["text"]

        server, history, sample = await shown(stack, TENANT, "server", "history", "sample")
        assert "settings" not in server
        assert history["events"]
        assert not [each for each in (*history["events"], *sample["events"]) if each["reason"]]
        assert not {"tenants", "errors"} & sample.keys()
        assert not {"address", "reason"} & sample["replicas"][0].keys()


async def test_without_the_dashboard_its_paths_are_unknown(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, settings={"dashboard": False}) as stack:
        for path in ("/dashboard", "/dashboard/events", "/dashboard/main.js"):
            assert (await stack.ask(path)).status == 404


async def test_more_viewers_than_the_limit_are_refused(demo_model: Path) -> None:
    async with serve(demo_model, chats=False) as stack, AsyncExitStack() as viewers:
        for _ in range(MAX_VIEWERS):
            await viewers.enter_async_context(stack.client.get("/dashboard/events"))
        refused = await stack.ask("/dashboard/events")
        assert (refused.status, refused.headers["retry-after"]) == (429, "60")


async def test_one_tenant_does_not_take_the_streams_of_others(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    async with serve(demo_model, chats=False, settings={"api_keys_file": str(tmp_path / "keys.toml")}) as stack:
        async with AsyncExitStack() as viewers:
            for _ in range(MAX_VIEWERS_OF_TENANT):
                await viewers.enter_async_context(stack.client.get("/dashboard/events", headers=TENANT))
            for headers, status in ((TENANT, 429), (OPERATOR, 200)):
                async with stack.client.get("/dashboard/events", headers=headers) as response:
                    assert response.status == status
        await shown(stack, TENANT, "server", "sample")


@pytest.mark.parametrize("linked", [False, True])
async def test_a_page_that_opens_late_sees_what_happened_before(demo_model: Path, linked: bool) -> None:
    # Less than the first events: they have room of their own.
    settings = {"max_unread_bytes": 2000}
    async with serve(demo_model, chats=False, linked=linked, settings=settings, echo_step_ms=2) as stack:
        await sample_with(stack, {}, lambda sample: sample["states"] == {"serving": 1})
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stack.generate("Hello", max_new_tokens=700))
            await until(lambda: stack.engine.running == 1)
            stack.stop_shard()
        await sample_with(stack, {}, lambda sample: sample["ended"]["length"] == 1)
        history, sample = await shown(stack, {}, "history", "sample")
        assert sum(row.get("new_tokens", 0) for row in history["rows"]) == history["last"]["new_tokens"] == 700
        assert sum(row.get("ended", {}).get("length", 0) for row in history["rows"]) == 1
        assert sample["now"] >= history["last"]["now"]
        kinds = [each["kind"] for each in history["events"]]
        assert kinds[0] == "started"
        assert [each["count"] for each in history["events"] if each["kind"] == "moved"] == [1]
        assert kinds.index("back", 1 + kinds.index("stopped")) > 0
        [replica] = sample["replicas"]
        assert (replica["restarts"], replica["state"], replica["new_tokens"]) == (1, "serving", 700)
        assert replica["uptime"] < sample["now"] - history["events"][0]["began"]
        assert 0 < replica["step_seconds"] / replica["steps"] < 1


async def test_a_viewer_does_not_hold_up_a_server_that_drains(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, linked=True) as stack, asyncio.timeout(20), events(stack, {}) as stream:
        names = [await anext(stream) for _ in range(3)]
        assert [name for name, _ in names] == ["server", "history", "sample"]
        stack.seen.draining = True
        async for name, _ in stream:
            assert name == "sample"


class GatedStats(OwnStats):
    """Takes a sample at each turn that it gets; the first one fails."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack.metrics, stack.cluster, period_s=0.001)
        self.turn = asyncio.Semaphore(1)
        self.failed = False

    async def collect(self) -> None:
        await self.turn.acquire()
        if not self.failed:
            self.failed = True
            raise ValueError("an unexpected state")


async def test_all_viewers_get_one_sample_and_one_that_cannot_be_taken_ends_nothing(demo_model: Path) -> None:
    async with serve(demo_model, chats=False) as stack, asyncio.timeout(20):
        stats = GatedStats(stack)
        async with background(stats.run()), asyncio.TaskGroup() as viewers:
            await until(lambda: stats.failed)
            stats.turn.release()
            first = await stats.sample_after(0.0)
            shown = [viewers.create_task(stats.sample_after(first.at)) for _ in range(3)]
            await asyncio.sleep(0)
            stats.turn.release()
            second = await stats.sample_after(first.at)
            assert {id(await each) for each in shown} == {id(second)} != {id(first)}
            assert await stats.sample_after(0.0) is second, "the last one at once"
