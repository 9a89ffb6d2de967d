"""The stand-in for tensorrt_llm: batching, the KV cache, statistics, the record, and compiled engines."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standin_loading import Standin
from trtllm_standin.inspection import Log

PROMPT = [5, 6, 7, 8]
SetUp = Callable[..., None]


def entries(standin: Standin, llm: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - an LLM
    """Statistics of requests that were read without an event loop."""
    return list(llm.get_stats(timeout=0.5))


class TestBatching:
    def test_no_more_than_the_batch_holds_and_the_rest_waits(self, standin: Standin) -> None:
        llm = standin.llm(max_batch_size=3, enable_iter_perf_stats=True)
        llm.generate([PROMPT] * 8, standin.params(max_tokens=5))
        found = entries(standin, llm)
        assert max(entry["inflightBatchingStats"]["numScheduledRequests"] for entry in found) == 3
        assert all(entry["numActiveRequests"] <= 3 for entry in found)

    def test_room_for_the_whole_answer_is_reserved_before_it_starts(self, standin: Standin) -> None:
        cache = {"max_tokens": 128, "tokens_per_block": 32}
        llm = standin.llm(kv_cache_config=cache, max_seq_len=128, enable_iter_perf_stats=True)
        llm.generate([PROMPT] * 4, standin.params(max_tokens=60))
        found = entries(standin, llm)
        # Two blocks each: two at a time, though the first tokens of all four would fit.
        assert max(entry["inflightBatchingStats"]["numScheduledRequests"] for entry in found) == 2
        assert max(entry["kvCacheStats"]["usedNumBlocks"] for entry in found) == 4
        assert found[-1]["kvCacheStats"]["freeNumBlocks"] == 4

    def test_prompts_share_the_token_budget_of_a_step(self, standin: Standin) -> None:
        llm = standin.llm(max_num_tokens=10, enable_iter_perf_stats=True)
        llm.generate([PROMPT] * 4, standin.params(max_tokens=1))
        assert [entry["inflightBatchingStats"]["numCtxTokens"] for entry in entries(standin, llm)] == [8, 8]

    def test_long_prompts_go_in_chunks_of_whole_blocks(self, standin: Standin) -> None:
        llm = standin.llm(max_num_tokens=70, enable_chunked_prefill=True, enable_iter_perf_stats=True)
        llm.generate(list(range(150)), standin.params(max_tokens=1))
        assert [entry["inflightBatchingStats"]["numCtxTokens"] for entry in entries(standin, llm)] == [64, 64, 22]

    def test_an_idle_engine_takes_no_time(self, standin: Standin) -> None:
        llm = standin.llm()
        llm.generate(PROMPT, standin.params())
        clock = time.pthread_getcpuclockid(llm._executor._engine._thread.ident)
        before = time.clock_gettime(clock)
        threading.Event().wait(0.3)
        assert time.clock_gettime(clock) - before < 0.05

    def test_other_capacity_policies_are_refused(self, standin: Standin) -> None:
        with pytest.raises(RuntimeError, match="Executor worker returned error") as caught:
            standin.llm(scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"})
        assert isinstance(caught.value.__cause__, NotImplementedError)

    async def test_blocks_are_shared_under_one_salt_only(self, standin: Standin) -> None:
        llm = standin.llm()
        prompt = list(range(100))
        cached = []
        for salt in (None, None, "a", "a", "b"):
            cached.append((await llm.generate_async(prompt, standin.params(), cache_salt=salt)).cached_tokens)
        assert cached == [0, 96, 0, 96, 0]
        assert (await llm.generate_async(prompt[:64], standin.params())).cached_tokens == 32

    async def test_or_not_at_all(self, standin: Standin) -> None:
        llm = standin.llm(kv_cache_config={"enable_block_reuse": False})
        for _ in range(2):
            assert (await llm.generate_async(list(range(100)), standin.params())).cached_tokens == 0

    async def test_priority_orders_those_who_wait(self, new: Standin, set_up: SetUp) -> None:
        set_up(step_ms=1)
        llm = new.llm(max_batch_size=1, scheduler_config={"waiting_queue_policy": "priority"})
        first = llm.generate_async(PROMPT, new.params(max_tokens=50), streaming=True)
        await anext(first)
        order: list[float] = []

        async def run(priority: float) -> None:
            await llm.generate_async(PROMPT, new.params(max_tokens=2), priority=priority)
            order.append(priority)

        async with asyncio.TaskGroup() as tasks:
            for priority in (0.1, 0.9, 0.5):
                tasks.create_task(run(priority))
            tasks.create_task(first.aresult())
        assert order == [0.9, 0.5, 0.1]

    async def test_priority_is_ignored_with_a_warning_first_come_first_served(self, new: Standin) -> None:
        with pytest.warns(UserWarning, match="priority is ignored"):
            await new.llm().generate_async(PROMPT, new.params(), priority=0.9)

    def test_priority_is_not_known_before(self, old: Standin) -> None:
        with pytest.raises(TypeError, match="priority"):
            old.llm().generate_async(PROMPT, old.params(), priority=0.9)


class TestStatistics:
    def test_nothing_unless_they_are_on(self, standin: Standin) -> None:
        llm = standin.llm()
        llm.generate(PROMPT, standin.params())
        assert llm.get_stats(timeout=0.05) == []

    @pytest.mark.parametrize("variant", ["queue", "rpc"])
    def test_nothing_before_the_first_request(self, standin: Standin, set_up: SetUp, variant: str) -> None:
        set_up(stats=variant)
        assert standin.llm(enable_iter_perf_stats=True).get_stats(timeout=0.05) == []

    async def test_put_by_they_can_be_iterated_until_none_comes(self, standin: Standin, set_up: SetUp) -> None:
        set_up(stats="queue")
        llm = standin.llm(enable_iter_perf_stats=True)
        assert [entry async for entry in llm.get_stats_async(0.05)] == []
        await llm.generate_async(PROMPT, standin.params(max_tokens=3))
        assert [entry["iter"] async for entry in llm.get_stats_async(0.3)] == [1, 2, 3]

    async def test_put_by_they_stay_dry_until_the_next_request(self, standin: Standin, set_up: SetUp) -> None:
        set_up(stats="queue", step_ms=5)
        llm = standin.llm(enable_iter_perf_stats=True)
        running = llm.generate_async(PROMPT, standin.params(max_tokens=20_000), streaming=True)
        await anext(running)
        # Entries leave the worker every 0.2 s: a shorter patience runs dry between two of them …
        while [entry async for entry in llm.get_stats_async(0.02)]:
            await anext(running)
        for _ in range(100):
            await anext(running)
        # … and then it stays so, whatever has come since.
        assert [entry async for entry in llm.get_stats_async(1.0)] == []
        await llm.generate_async(PROMPT, standin.params(max_tokens=1))
        assert await anext(llm.get_stats_async(5.0))
        running.abort()
        await running

    async def test_put_by_on_a_loop_they_cannot_be_fetched_synchronously(self, standin: Standin, set_up: SetUp) -> None:
        set_up(stats="queue")
        llm = standin.llm(enable_iter_perf_stats=True)
        await llm.generate_async(PROMPT, standin.params(max_tokens=1))
        with pytest.raises(TypeError):
            llm.get_stats(timeout=0.05)
        with pytest.raises(Exception, match="mixing of synchronous and asynchronous"):
            await anext(llm.get_stats_async(0.05))

    async def test_put_by_without_patience_it_is_an_error(self, standin: Standin, set_up: SetUp) -> None:
        set_up(stats="queue")
        llm = standin.llm()
        await llm.generate_async(PROMPT, standin.params(max_tokens=1))
        with pytest.raises(asyncio.QueueEmpty):
            await anext(llm.get_stats_async(0))

    async def test_fetched_they_can_be_had_either_way(self, standin: Standin, set_up: SetUp) -> None:
        set_up(stats="rpc")
        llm = standin.llm(enable_iter_perf_stats=True)
        await llm.generate_async(PROMPT, standin.params(max_tokens=2))
        assert [entry["iter"] for entry in llm.get_stats(timeout=1)] == [1, 2]
        await llm.generate_async(PROMPT, standin.params(max_tokens=2))
        assert [entry["iter"] async for entry in llm.get_stats_async(0.1)] == [3, 4]

    def test_there_is_one_reader(self, standin: Standin) -> None:
        llm = standin.llm(enable_iter_perf_stats=True)
        llm.generate(PROMPT, standin.params(max_tokens=3))
        assert [len(llm.get_stats(timeout=0.3)), len(llm.get_stats(timeout=0.05))] == [3, 0]

    def test_no_more_are_kept_than_there_is_place_for(self, standin: Standin, set_up: SetUp) -> None:
        set_up(stats="rpc")
        llm = standin.llm(enable_iter_perf_stats=True, max_stats_len=5)
        llm.generate(PROMPT, standin.params(max_tokens=30))
        assert [entry["iter"] for entry in llm.get_stats(timeout=0.05)] == [26, 27, 28, 29, 30]

    def test_the_caches_size_without_any(self, new: Standin) -> None:
        llm = new.llm(kv_cache_config={"max_tokens": 1000, "tokens_per_block": 64})
        assert llm.get_kv_cache_capacity() == {"maxNumBlocks": 16, "tokensPerBlock": 64, "maxNumTokens": 1024}

    def test_before_there_is_no_such_call(self, old: Standin) -> None:
        assert not hasattr(old.package.LLM, "get_kv_cache_capacity")

    def test_no_cache_events(self, standin: Standin) -> None:
        assert standin.llm().get_kv_cache_events(timeout=0) == []


class TestRecord:
    async def test_what_arrived_and_how_it_ended(self, standin: Standin, set_up: SetUp, tmp_path: Path) -> None:
        path = tmp_path / "log"
        set_up(log=path, fail_token=666)
        llm = standin.llm(max_batch_size=4, kv_cache_config={"max_tokens": 640})
        bias = [0.0, 0.0, 0.0, -1.5]
        await llm.generate_async(PROMPT, standin.params(seed=3, embedding_bias=bias, max_tokens=2), cache_salt="x")
        with pytest.raises(standin.request_error):
            await llm.generate_async([666], standin.params(), streaming=True)
        llm.shutdown()
        log = Log.read(path)
        made = log.of("llm")[0]["arguments"]
        assert (made["max_batch_size"], made["kv_cache_config"]) == (4, {"max_tokens": 640})
        first, second = log.of("request")
        assert first["prompt"] == PROMPT
        assert first["sampling"] == {
            "end_id": -1,
            "pad_id": -1,
            "max_tokens": 2,
            "seed": 3,
            "embedding_bias": {"3": -1.5},
            "detokenize": False,
        }
        assert (first["with"]["cache_salt"], first["with"]["streaming"], second["with"]["streaming"]) == (
            "x",
            False,
            True,
        )
        assert log.ends == {"length": 1, "error": 1}
        assert log.unfinished == set()
        assert log.of("shutdown")[0] | {"event": ""} == {"event": "", "active": 0, "waiting": 0}

    async def test_what_has_not_ended_shows(self, standin: Standin, set_up: SetUp, tmp_path: Path) -> None:
        path = tmp_path / "log"
        set_up(log=path, step_ms=1)
        result = standin.llm().generate_async(PROMPT, standin.params(max_tokens=20_000), streaming=True)
        await anext(result)
        assert Log.read(path).unfinished == {result.request_id}
        result.abort()
        await result
        assert Log.read(path).unfinished == set()


ENGINE = {
    "version": "1.2.1",
    "pretrained_config": {
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1, "cp_size": 1},
    },
    "build_config": {
        "max_input_len": 100,
        "max_seq_len": 200,
        "max_batch_size": 4,
        "max_beam_width": 1,
        "max_num_tokens": 128,
        "opt_num_tokens": 64,
    },
}


class TestCompiledEngines:
    @pytest.fixture
    def engine_folder(self, tmp_path: Path) -> Path:
        """A folder as the builder leaves it, for two ranks."""
        (tmp_path / "config.json").write_text(json.dumps(ENGINE))
        for rank in range(2):
            (tmp_path / f"rank{rank}.engine").write_bytes(b"engine")
        return tmp_path

    def load(self, old: Standin, folder: Path, **kwargs: object) -> Any:  # noqa: ANN401 - an LLM
        """The legacy backend on a folder."""
        llm = old.find("tensorrt_llm._tensorrt_engine", "LLM")(folder, skip_tokenizer_init=True, **kwargs)
        old.made.append(llm)
        return llm

    async def test_its_limits_are_the_built_ones(self, old: Standin, engine_folder: Path) -> None:
        llm = self.load(old, engine_folder, max_batch_size=64, max_num_tokens=100, max_seq_len=4096)
        args = llm.args
        assert (args.max_batch_size, args.max_num_tokens, args.max_seq_len) == (4, 100, 200)
        assert (await llm.generate_async(PROMPT, old.params(max_tokens=2))).outputs[0].length == 2

    async def test_its_sampler_honours_everything(self, old: Standin, engine_folder: Path) -> None:
        result = self.load(old, engine_folder).generate_async(
            [5, 5, 6], old.params(repetition_penalty=1.2, max_tokens=2)
        )
        assert list((await result).outputs[0].token_ids) == [5, 6]

    async def test_it_looks_at_more_before_a_request_is_submitted(self, old: Standin, engine_folder: Path) -> None:
        llm = self.load(old, engine_folder)
        with pytest.raises(ValueError, match=r"should not exceed max_seq_len \(200\)"):
            llm.generate_async(PROMPT, old.params(max_tokens=197))
        with pytest.raises(ValueError, match="requires `gather_generation_logits=True`"):
            llm.generate_async(PROMPT, old.params(logprobs=1))
        with pytest.raises(ValueError, match="requires `gather_context_logits=True`"):
            llm.generate_async(PROMPT, old.params(prompt_logprobs=1))

    async def test_a_guide_is_refused_without_a_decoder(self, old: Standin, engine_folder: Path) -> None:
        guide = old.find("tensorrt_llm.llmapi", "GuidedDecodingParams")(regex="a")
        with pytest.raises(old.request_error, match="GuidedDecoder is not setup"):
            await self.load(old, engine_folder).generate_async(PROMPT, old.params(guided_decoding=guide))

    @pytest.mark.parametrize(
        ("change", "arguments", "error"),
        [
            ({"version": "1.1.0"}, {}, "Failed to deserialize cuda engine"),
            ({}, {"tensor_parallel_size": 4}, "different from the engine's tp_size 2"),
            ({}, {"kv_cache_config": {"dtype": "fp8"}}, "dtype is not supported"),
            ({"build_config": {}}, {}, "max_input_len"),
        ],
        ids=["another version's", "another number of ranks", "a cache type", "limits that are missing"],
    )
    def test_what_it_cannot_load(
        self, old: Standin, engine_folder: Path, change: dict[str, object], arguments: dict[str, object], error: str
    ) -> None:
        (engine_folder / "config.json").write_text(json.dumps({**ENGINE, **change}))
        with pytest.raises(Exception, match=error):
            self.load(old, engine_folder, **arguments)

    def test_a_rank_that_is_missing(self, old: Standin, engine_folder: Path) -> None:
        (engine_folder / "rank1.engine").unlink()
        with pytest.raises(RuntimeError, match=r"Error opening engine file.*rank1\.engine"):
            self.load(old, engine_folder)

    def test_the_backend_is_gone_on_main(self, new: Standin) -> None:
        with pytest.raises(ModuleNotFoundError):
            new.find("tensorrt_llm._tensorrt_engine", "LLM")


async def test_whatever_is_cancelled_nothing_is_left(standin: Standin, set_up: SetUp, tmp_path: Path) -> None:
    path = tmp_path / "log"
    set_up(log=path, step_ms=0.2)
    llm = standin.llm(max_batch_size=16, kv_cache_config={"max_tokens": 2048}, max_seq_len=512)
    draw = random.Random(5)

    async def run() -> None:
        prompt = [draw.randrange(100) for _ in range(draw.randrange(1, 200))]
        result = llm.generate_async(prompt, standin.params(max_tokens=draw.randrange(1, 80)), streaming=True)
        patience = draw.choice([0, 1, 5, None])
        seen = 0
        while patience is None or seen < patience:
            try:
                await anext(result)
            except StopAsyncIteration:
                return
            seen += 1
        result.abort()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(600):
            tasks.create_task(run())
    # Behind everything that was cancelled: when this is answered, all of that has been dealt with.
    await llm.generate_async(PROMPT, standin.params(max_tokens=80))
    log = Log.read(path)
    assert log.unfinished == set()
    assert log.ends["cancelled"] > 20
    assert log.ends["length"] > 20
    assert log.ends["dropped"] > 20
    engine = llm._executor._engine
    assert (engine.active, engine.waiting, engine.scheduler.pool.used) == (0, 0, 0)
