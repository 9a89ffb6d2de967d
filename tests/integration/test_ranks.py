"""Attention data parallelism: the router fills the ranks of an engine as it fills replicas, over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from cluster_listener import Listener
from http_stack import until
from lora_folder import an_adapter
from served_cluster import Members, world
from shard_server import ServedShard, serve_engine
from standin import model_folder, read_log
from trtllm_engines import Engines

from text_generation_router.errors import GenerationFailed
from text_generation_router.request import Request, RequestId
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.tensorrt_llm.engine import TensorRTEngine

PROMPTS = [tuple(range(100 * n, 100 * n + 96)) for n in range(1, 12)]


@dataclass
class Ranks:
    """A cluster over one engine with two ranks, of two slots and 512 tokens each."""

    members: Members
    engine: TensorRTEngine
    shard: ServedShard
    log: Path

    def submit(self, prompt: tuple[int, ...], new: int, **fields: Any) -> Listener:  # noqa: ANN401 - of Request
        listener = Listener()
        self.members.world.requests += 1
        self.members.cluster.submit(Request(RequestId(self.members.world.requests), prompt, new, **fields), listener)
        return listener

    async def served(self, prompt: tuple[int, ...], new: int = 2, **fields: Any) -> Listener:  # noqa: ANN401 - of Request
        listener = self.submit(prompt, new, **fields)
        await listener.over.wait()
        return listener

    @property
    def asked(self) -> list[tuple[tuple[int, ...], int]]:
        """The first token of the prompt, and the rank, of each request that the engine got."""
        requests = read_log(self.log).of("request")
        return [(tuple(each["prompt"]), each["rank"]) for each in requests if "rank" in each]


@asynccontextmanager
async def two_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> AsyncIterator[Ranks]:
    engines = Engines("1.3", model_folder(folder / "model"), monkeypatch)
    options = "{enable_attention_dp: true, kv_cache_config: {max_tokens: 512}}"
    given: dict[str, Any] = {"num_shard": 2, "max_batch_size": 2, "options": options, "log": folder / "log"}
    try:
        engine = engines(**given | settings)
        address = f"unix://{folder}/shard"
        async with AsyncExitStack() as stack:
            config = ShardConfig(model_path=str(folder / "model"), lora_modules_dir=str(folder))
            shard = await stack.enter_async_context(serve_engine(engine, address, config=config))
            shards = await stack.enter_async_context(world(folder))
            yield Ranks(await shards.cluster(address), engine, shard, folder / "log")
    finally:
        engines.close()


def generated(prompt: tuple[int, ...], new: int) -> list[int]:
    return list(islice(cycle(prompt), new))


async def test_requests_are_balanced_over_ranks_and_wait_in_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_ranks(tmp_path, monkeypatch, step_ms=2) as ranks:
        listeners = [ranks.submit(prompt, 150) for prompt in PROMPTS[:4]]
        more = ranks.submit(PROMPTS[4], 5)
        await until(lambda: all(listener.tokens for listener in listeners))
        assert sorted(rank for _, rank in ranks.asked) == [0, 0, 1, 1]
        scheduler = ranks.members.cluster.scheduler
        assert (more.tokens, len(scheduler.queue)) == ([], 1)
        assert [each.occupied_slots for each in scheduler.serving] == [2, 2]
        assert read_log(ranks.log).of("wait") == []
        for listener, prompt in zip([*listeners, more], PROMPTS, strict=False):
            await listener.over.wait()
            assert listener.tokens == generated(prompt, len(listener.tokens))
        assert [len(listener.tokens) for listener in (*listeners, more)] == [150] * 4 + [5]
        with pytest.raises(GenerationFailed, match="no replica can hold"):
            ranks.submit(PROMPTS[0], 512)
        await until(lambda: scheduler.stats().running == 0)


async def test_a_prompt_goes_to_the_rank_that_has_its_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_ranks(tmp_path, monkeypatch) as ranks:
        for prompt in PROMPTS[:3]:
            await ranks.served(prompt)
        [first, *_] = homes = dict(ranks.asked).values()
        assert set(homes) == {0, 1}
        for prompt in (PROMPTS[2], PROMPTS[0], PROMPTS[1], PROMPTS[0]):
            again = await ranks.served((*prompt, 5), 3)
            assert ("cached", 96) in again.events
        assert ranks.asked[-1][1] == first
        assert ranks.members.cluster.scheduler.stats().hit_tokens == 4 * 96


async def test_a_lost_shard_loses_all_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_ranks(tmp_path, monkeypatch, step_ms=2) as ranks:
        listeners = [ranks.submit(prompt, 150) for prompt in PROMPTS[:4]]
        await until(lambda: all(listener.tokens for listener in listeners))
        ranks.shard.end_session()
        scheduler = ranks.members.cluster.scheduler
        await until(lambda: all("lost" in listener.events for listener in listeners))
        for listener in listeners:
            await listener.over.wait()
            assert (len(listener.tokens), listener.error) == (150, None)
        stats = scheduler.stats()
        assert (stats.num_replicas, stats.serving_replicas, stats.moves) == (2, 2, 4)
        [member] = (await ranks.members.cluster.info()).members
        assert (member.replica, member.state) == (0, "serving")
        ranks.members.set()
        await ranks.shard.drain()
        await until(lambda: not ranks.members.cluster.members)
        assert scheduler.replicas == {}


async def test_all_ranks_hold_an_adapter_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = an_adapter(tmp_path / "sql")
    async with two_ranks(tmp_path, monkeypatch, lora_modules_dir=str(tmp_path), step_ms=2) as ranks:
        await ranks.members.cluster.set_adapter("sql", str(sql))
        listeners = [ranks.submit(prompt, 50, adapter="sql") for prompt in PROMPTS[:4]]
        for listener in listeners:
            await listener.over.wait()
        assert [listener.tokens[0] for listener in listeners] == [prompt[-1] for prompt in PROMPTS[:4]]
        assert sorted(rank for _, rank in ranks.asked) == [0, 0, 1, 1]
