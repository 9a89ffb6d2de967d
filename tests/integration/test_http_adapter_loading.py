"""LoRA adapters that come and go while the server runs: routes, permission, all replicas alike, places on the device.

The echo engine with an adapter writes the prompt backwards.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from cluster_listener import Listener
from every_dialect import CHAT, COMPLETIONS, VERBATIM
from hanging_shard import Hanging, between
from host_ledger import HostBlocks
from http_stack import Reply, Stack, serve, until
from served_cluster import Members, world

from text_generation_router.api.core.serving import all_of
from text_generation_router.errors import InvalidRequest, ModelNotFound, NotFound, Unhealthy
from text_generation_router.request import Request, RequestId
from text_generation_router.shards import replica

PROMPT = " one two three four five six" * 20
FORWARDS, BACKWARDS = " one two", " six five"
KEY = "sk-operator"


def folder_of(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).mkdir(parents=True)
    return path


@asynccontextmanager
async def loading(demo_model: Path, folder: Path, **options: Any) -> AsyncIterator[Stack]:  # noqa: ANN401
    folder_of(folder, "sql", "deep/french")
    async with serve(demo_model, chat_template=VERBATIM, lora_modules_dir=str(folder), **options) as stack:
        yield stack


async def load(stack: Stack, name: object, path: object, **headers: str) -> Reply:
    return await stack.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, headers)


async def unload(stack: Stack, name: str, **headers: str) -> Reply:
    return await stack.ask("/v1/unload_lora_adapter", {"lora_name": name}, headers)


async def listed(stack: Stack) -> list[str]:
    return [each["id"] for each in (await stack.ask("/v1/models")).body["data"]]


@pytest.mark.parametrize("linked", [False, True])
async def test_an_adapter_is_loaded_used_and_unloaded(demo_model: Path, tmp_path: Path, linked: bool) -> None:
    async with loading(demo_model, tmp_path, linked=linked) as stack:
        for name, path in (("sql", "sql"), ("org/fr", str(tmp_path / "deep/../deep/french"))):
            reply = await load(stack, name, path)
            assert (reply.status, reply.body) == (200, f"Success: LoRA adapter '{name}' added successfully.")
        assert await listed(stack) == ["echo", "sql", "org/fr"]
        assert (await stack.generate(PROMPT, max_new_tokens=2, adapter_id="sql"))["generated_text"] == BACKWARDS
        again = await load(stack, "sql", "sql")
        assert again.status == 400
        assert again.body["error"]["message"].endswith("The lora adapter 'sql' has already been loaded.")
        assert again.body["error"]["param"] == "lora_name"
        reply = await unload(stack, "sql")
        assert (reply.status, reply.body) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert (await stack.ask("/generate", {"inputs": "a", "parameters": {"adapter_id": "sql"}})).status == 404
        assert await listed(stack) == ["echo", "org/fr"]
        missing = await unload(stack, "sql")
        assert (missing.status, missing.body["error"]["message"]) == (404, "The lora adapter 'sql' cannot be found.")


async def test_another_adapter_under_the_name_finds_no_cached_prompts(demo_model: Path, tmp_path: Path) -> None:
    async with loading(demo_model, tmp_path) as stack:

        async def cached() -> int:
            details = (await stack.generate(PROMPT, max_new_tokens=2, details=True, adapter_id="sql"))["details"]
            await until(lambda: stack.engine.running == 0)
            return int(details.get("cached_tokens", 0))

        assert (await load(stack, "sql", "sql")).status == 200
        assert (await cached(), await cached() > 100) == (0, True)
        for path in ("sql", "deep/french"):
            await unload(stack, "sql")
            assert (await load(stack, "sql", path)).status == 200
        assert await cached() == 0


@pytest.mark.parametrize("linked", [False, True])
async def test_an_adapter_in_use_is_unloaded_after_its_last_request(
    demo_model: Path, tmp_path: Path, linked: bool
) -> None:
    options: dict[str, Any] = {"linked": linked, "echo_step_ms": 2, "policy": {"max_batch_size": 1}}
    async with loading(demo_model, tmp_path, **options) as stack, asyncio.TaskGroup() as tasks:
        await load(stack, "sql", "sql")
        # One runs, and one waits for its turn.
        answers = [
            tasks.create_task(stack.generate(PROMPT, max_new_tokens=100, adapter_id="sql", details=True))
            for _ in range(2)
        ]
        await until(lambda: stack.engine.running == 1 and len(stack.scheduler.queue) == 1)
        assert (await unload(stack, "sql")).status == 200
        assert (await stack.ask("/generate", {"inputs": "a", "parameters": {"adapter_id": "sql"}})).status == 404
        refused = await load(stack, "sql", "sql")
        assert (refused.status, "is being unloaded" in refused.body["error"]["message"]) == (400, True)
        assert stack.engine.info.adapters == ("sql",)
        for answer in answers:
            assert (await answer)["details"]["generated_tokens"] == 100
        await until(lambda: not stack.engine.info.adapters)


async def test_folders_elsewhere_and_other_mistakes_are_refused(demo_model: Path, tmp_path: Path) -> None:
    folder, outside = folder_of(tmp_path / "modules"), folder_of(tmp_path / "outside", "secret")
    folder_of(folder, "inside")
    (folder / "link").symlink_to(outside)
    (folder / "inside/adapter_model.safetensors").symlink_to(outside / "weights")
    (folder / "circle").symlink_to(folder / "circle")
    async with loading(demo_model, folder, max_cpu_loras=1) as stack:
        paths = (
            "..",
            "../outside",
            "link",
            "link/secret",
            str(outside),
            "/",
            ".",
            "sql/..",
            "inside",
            "circle",
            "a\0b",
        )
        for path in paths:
            reply = await load(stack, "a", path)
            assert reply.status == 400, (path, reply)
            assert "`lora_path`" in reply.body["error"]["message"]
        for path in ("absent", "sql/absent", "x" * 300):
            assert (await load(stack, "a", path)).status in (404, 400), path
        for name, path in (
            ("", "sql"),
            ("a,b", "sql"),
            ("a=b", "sql"),
            ("a\nb", "sql"),
            ("echo", "sql"),
            ("tgi", "sql"),
            (1, "sql"),
            ("a", ""),
        ):
            assert (await load(stack, name, path)).status == 400, (name, path)
        in_place = {"lora_name": "a", "lora_path": "sql", "load_inplace": True}
        assert (await stack.ask("/v1/load_lora_adapter", in_place)).status == 400
        assert await listed(stack) == ["echo"]
        assert (await load(stack, "a", "sql")).status == 200
        full = await load(stack, "b", "sql")
        assert (full.status, "--max-cpu-loras" in full.body["error"]["message"]) == (400, True)


async def test_adapters_without_requests_leave_their_room_at_once(demo_model: Path, tmp_path: Path) -> None:
    async with loading(demo_model, tmp_path, max_cpu_loras=2) as stack:
        for names in ("ab", "cd", "ab"):
            for name in names:
                reply = await load(stack, name, "sql")
                assert reply.status == 200, reply.body
            for name in names:
                assert (await unload(stack, name)).status == 200


async def test_the_operator_permits_it_and_calls(demo_model: Path, tmp_path: Path) -> None:
    async with serve(demo_model, chats=False, lora_adapters="sql") as stack:
        for reply in (await load(stack, "a", "a"), await unload(stack, "sql")):
            assert (reply.status, "--lora-modules-dir" in reply.body["error"]["message"]) == (404, True)
        assert await listed(stack) == ["echo", "sql"]
    async with loading(demo_model, tmp_path / "one", settings={"api_key": [KEY]}) as stack:
        assert (await load(stack, "sql", "sql")).status == 401
        assert (await load(stack, "sql", "sql", authorization=f"Bearer {KEY}")).status == 200
    async with loading(demo_model, tmp_path / "two", settings={"api_key": [KEY, "sk-tenant"]}) as stack:
        for reply in (
            await load(stack, "sql", "sql", authorization="Bearer sk-tenant"),
            await unload(stack, "sql", authorization="Bearer sk-tenant"),
        ):
            assert (reply.status, reply.body["error"]["code"]) == (403, "permission_denied")


@pytest.mark.parametrize("asking", [CHAT, COMPLETIONS], ids=lambda asking: asking.path)
async def test_a_request_of_trtllm_serve_loads_its_adapter(demo_model: Path, tmp_path: Path, asking: Any) -> None:  # noqa: ANN401
    async with loading(demo_model, tmp_path) as stack:
        asked = {"lora_name": "sql", "lora_int_id": 3, "lora_path": str(tmp_path / "sql")}
        body = asking.body(PROMPT, 2) | {"lora_request": asked}
        replies = await all_of([stack.ask(asking.path, body) for _ in range(3)])
        assert [(reply.status, BACKWARDS in str(reply.body)) for reply in replies] == [(200, True)] * 3
        assert await listed(stack) == ["echo", "sql"]
        refused = await stack.ask(asking.path, body | {"lora_request": {"lora_name": "b", "lora_path": "../b"}})
        assert refused.status == 400


async def test_more_adapters_than_places_take_turns(demo_model: Path) -> None:
    names = [f"a{number}" for number in range(5)]
    options = {"lora_adapters": ",".join(names), "max_loras": 2, "echo_step_ms": 1}
    async with serve(demo_model, chats=False, **options) as stack, asyncio.TaskGroup() as tasks:
        rounds = Counter[str]()

        async def ask(name: str, new: int) -> None:
            reply = await stack.generate(PROMPT, max_new_tokens=new, adapter_id=name or None, details=True)
            assert reply["generated_text"].startswith(BACKWARDS if name else FORWARDS)
            assert reply["details"]["generated_tokens"] == new
            rounds[name] += 1

        async def keep_asking(name: str, new: int) -> None:
            while not rounds.keys() >= set(names[2:]) and rounds[name] < 100:
                await ask(name, new)

        # Two adapters have places, and never a moment without a request; the others come to their turns all the same.
        for name in names[:2]:
            for new in (20, 31, 43):
                tasks.create_task(keep_asking(name, new))
        await until(lambda: stack.engine.running == 6)
        await all_of([ask("", 2), *(ask(name, 5) for name in names[2:])])
        assert max(rounds.values()) < 100, rounds


def submit(router: Members, adapter: str, new: int = 2, prompt: tuple[int, ...] = (1, 2, 3)) -> Listener:
    listener = Listener()
    router.world.requests += 1
    router.cluster.submit(Request(RequestId(router.world.requests), prompt, new, adapter=adapter), listener)
    return listener


async def test_all_replicas_hold_an_adapter_or_none(tmp_path: Path) -> None:
    both, one = folder_of(tmp_path / "both", "sql", "fr"), folder_of(tmp_path / "one", "sql")
    async with world(tmp_path) as shards:
        a, b = await shards.shard("a", lora_modules_dir=str(both)), await shards.shard("b", lora_modules_dir=str(one))
        router = await shards.cluster(a, b)
        await router.until({a: "serving", b: "serving"})
        with pytest.raises(NotFound, match="there is no folder fr below --lora-modules-dir"):
            await router.cluster.set_adapter("fr", "fr")
        assert [each.info.adapters for each in shards.engines.values()] == [(), ()]
        with pytest.raises(ModelNotFound):
            submit(router, "fr")
        # The client that asks leaves at once: the change is made to its end.
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(router.cluster.set_adapter("sql", "sql"))
            await asyncio.sleep(0)
            asking.cancel()
        assert asking.cancelled()
        await until(lambda: "sql" in router.cluster.adapters)
        assert [each.info.adapters for each in shards.engines.values()] == [("sql",), ("sql",)]

        # A replica that joins gets it, one without it serves the rest, and a lost one has it again.
        c, d = await shards.shard("c", lora_modules_dir=str(both)), await shards.shard("d")
        router.set(a, b, c, d)
        await router.until(dict.fromkeys((a, b, c, d), "serving"))
        assert [each.info.adapters for each in shards.engines.values()] == [("sql",)] * 3 + [()]
        for address in (a, b, c):
            shards.shards[address].end_session()
        shards.engines[a].info = shards.engines[a].table.set_adapter("sql", held=False)  # as after a restart
        await until(lambda: sum(each.losses for each in router.cluster.members) == 3)
        listener = submit(router, "sql")
        await listener.over.wait()
        assert listener.tokens == [3, 2]
        await router.until(dict.fromkeys((a, b, c, d), "serving"))
        await until(lambda: shards.engines[a].info.adapters == ("sql",))

        # Another router finds it, and loads it on a replica of its own.
        router.set(d)
        await router.until({d: "serving"})
        e = await shards.shard("e", lora_modules_dir=str(both))
        second = await shards.cluster(a)
        await second.until({a: "serving"})
        assert list(second.cluster.adapters) == ["sql"]
        second.set(a, e)
        await second.until({a: "serving", e: "serving"})
        assert shards.engines[e].info.adapters == ("sql",)

        # A replica that was away while it was unloaded loses it when it is back.
        second.set(a)
        await second.until({a: "serving"})
        await second.cluster.set_adapter("sql", None)
        second.set(a, e)
        await second.until({a: "serving", e: "serving"})
        await until(lambda: not shards.engines[a].info.adapters)
        assert not shards.engines[e].info.adapters
        with pytest.raises(NotFound):
            await second.cluster.set_adapter("sql", None)
        with pytest.raises(InvalidRequest):
            await second.cluster.set_adapter("sql", "../sql")


@pytest.mark.parametrize("by_another_router", [False, True])
async def test_an_adapter_that_is_loaded_has_nothing_on_the_host(tmp_path: Path, by_another_router: bool) -> None:
    modules = str(folder_of(tmp_path / "modules", "sql"))
    async with world(tmp_path) as shards:
        a = await shards.shard("a", lora_modules_dir=modules, host_cache_name="memory", model_path=modules)
        engine = shards.engines[a]
        engine.host = HostBlocks(64)
        router = await shards.cluster(a)
        await router.until({a: "serving"})
        await router.cluster.set_adapter("sql", "sql")
        if by_another_router:
            d = await shards.shard("d", lora_modules_dir=modules, model_path=modules)
            router.set(d)
            await router.until({d: "serving"})
            router = await shards.cluster(a)
            await router.until({a: "serving"})
        figures = router.cluster.scheduler.host_caches

        async def loaded(adapter: str) -> int:
            before = figures.figures["loaded"]
            beside = submit(router, "", new=20)  # copies take steps
            await submit(router, adapter, prompt=tuple(range(100))).over.wait()
            await beside.over.wait()
            return figures.figures["loaded"] - before

        assert [await loaded("sql"), await loaded("")] == [0, 0]
        assert 6 <= figures.figures["stored"] < 2 * 6
        shards.shards[a].end_session()
        engine.info = engine.table.set_adapter("sql", held=False)  # as after a restart; its files may be others
        await until(lambda: engine.info.adapters == ("sql",))
        assert [await loaded("sql"), await loaded("")] == [0, 6]


async def test_a_load_goes_on_without_a_replica_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hanging, "goes_on", asyncio.Event())
    Hanging.goes_on.set()
    modules = {"lora_modules_dir": str(folder_of(tmp_path / "modules", "sql"))}
    async with world(tmp_path) as shards, asyncio.TaskGroup() as tasks:
        a, b = await shards.shard("a", **modules), await shards.shard("b", Hanging, **modules)
        router = await shards.cluster(a, b)
        await router.until({a: "serving", b: "serving"})
        load = tasks.create_task(router.cluster.set_adapter("sql", "sql"))
        await until(lambda: not Hanging.goes_on.is_set())
        router.set(a)
        shards.shards[b].end_session()
        await load
        assert list(router.cluster.adapters) == ["sql"]
        Hanging.goes_on.set()


async def test_requests_of_an_adapter_that_is_unloaded_survive_the_loss_of_their_shard(tmp_path: Path) -> None:
    modules = {"lora_modules_dir": str(folder_of(tmp_path / "modules", "sql", "fr"))}
    async with world(tmp_path) as shards:
        a = await shards.shard("a", **modules)
        router = await shards.cluster(a)
        for name in ("sql", "fr"):
            await router.cluster.set_adapter(name, name)
        listeners = [submit(router, "sql", 300), submit(router, "fr", 300)]
        await until(lambda: all(listener.tokens for listener in listeners))
        await router.cluster.set_adapter("sql", None)
        shards.shards[a].end_session()
        shards.engines[a].info = shards.engines[a].table.set_adapter("sql", held=False)  # as after a restart
        for listener in listeners:
            await listener.over.wait()
            assert (listener.tokens[:3], len(listener.tokens), listener.error) == ([3, 2, 1], 300, None)
        await until(lambda: shards.engines[a].info.adapters == ("fr",))
        assert list(router.cluster.adapters) == ["fr"]
        shards.engines[a].info = shards.engines[a].table.set_adapter(
            "sql", held=True
        )  # as after a load that failed elsewhere
        await router.cluster.set_adapter("sql", "sql")
        assert list(router.cluster.adapters) == ["fr", "sql"]


@pytest.mark.parametrize("hang_timeout_s", [0, 1])
async def test_changes_do_not_wait_long_for_a_replica_that_hangs_while_it_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang_timeout_s: int
) -> None:
    monkeypatch.setattr(replica, "HANGS_AFTER_S", 1)
    monkeypatch.setattr(Hanging, "goes_on", asyncio.Event())
    modules = {"lora_modules_dir": str(folder_of(tmp_path / "modules", "sql", "fr"))}
    Hanging.goes_on.set()
    async with world(tmp_path) as shards:
        a, behind = await shards.shard("a", **modules), await shards.shard("b", Hanging, **modules)
        b = await shards.stack.enter_async_context(between(tmp_path / "between", behind))
        router = await shards.cluster(a, hang_timeout_s=hang_timeout_s)
        await router.until({a: "serving"})
        await router.cluster.set_adapter("sql", "sql")
        router.set(a, b)
        await until(lambda: not Hanging.goes_on.is_set())
        async with asyncio.timeout(10):
            with nullcontext() if hang_timeout_s else pytest.raises(Unhealthy, match="a replica does not answer"):
                await router.cluster.set_adapter("fr", "fr")
        assert set(router.cluster.adapters) == ({"sql", "fr"} if hang_timeout_s else {"sql"})
        Hanging.goes_on.set()
        if not hang_timeout_s:  # it is not lost
            await router.until({a: "serving", b: "serving"})
