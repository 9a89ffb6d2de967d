"""Traps of TensorRT-LLM in aborts, failures, statistics and compiled engines; the stand-in's code names the sources."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from model_folders import ENGINE, RANKS, fill
from standin_loading import Standin, tokens
from trtllm_standin.inspection import Log

PROMPT = [5, 6, 7, 8]
ENDLESS = 20_000
SetUp = Callable[..., None]


async def never_answers(result: Any) -> None:  # noqa: ANN401 - a RequestOutput
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(result), 0.2)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - another thread or process changes it
            await asyncio.sleep(0.005)


@pytest.fixture
def log(tmp_path: Path, set_up: SetUp) -> Path:
    path = tmp_path / "log.jsonl"
    set_up(log=path)
    return path


# --------------------------------------------------------------------------------------------------------------- aborts


async def test_an_aborted_queued_request_is_never_answered(standin: Standin, set_up: SetUp, log: Path) -> None:
    set_up(step_ms=1)
    llm = standin.llm(max_batch_size=1)
    running = llm.generate_async(PROMPT, standin.params(max_tokens=ENDLESS), streaming=True)
    await anext(running)
    queued = llm.generate_async(PROMPT, standin.params(), streaming=True)
    queued.abort()
    await until(lambda: Log.read(log).ends["dropped"] == 1)
    await never_answers(queued)
    running.abort()
    await running
    assert Log.read(log).unfinished == set()


# ------------------------------------------------------------------------------------------------------------- failures


async def test_the_death_of_the_engine(standin: Standin, set_up: SetUp) -> None:
    """In 1.2 only the next call raises it; in 1.3 every result does."""
    set_up(fatal_token=666, step_ms=1)
    llm = standin.llm()
    fatal = llm.generate_async([666], standin.params(), streaming=True)
    if standin.version == "1.2":
        await never_answers(fatal)
        with pytest.raises(RuntimeError, match="666") as caught:
            llm.generate_async(PROMPT, standin.params())
        assert not isinstance(caught.value, standin.request_error)
        with pytest.raises(RuntimeError, match="LLM is shutting down"):
            llm.generate_async(PROMPT, standin.params())
    else:
        with pytest.raises(standin.find("tensorrt_llm.executor", "EngineDeadError"), match="666"):
            await fatal
        assert not llm._check_health()


def worker_processes(of: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in of.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # zombies included
            found += [child] if "mpi4py.futures.server" in child.cmdline() else []
    return found


async def test_the_death_of_a_worker_process(standin: Standin, set_up: SetUp) -> None:
    """In 1.2 nothing notices it."""
    set_up(workers=1)
    llm = standin.llm(tensor_parallel_size=2)
    workers = worker_processes(psutil.Process())
    assert len(workers) == 2
    workers[1].kill()
    if standin.version == "1.2":
        await asyncio.to_thread(psutil.wait_procs, workers[1:], 20)
        await never_answers(llm.generate_async(PROMPT, standin.params(), streaming=True))
        assert llm._check_health()
        workers[0].kill()
        standin.abandon(llm)
    else:
        await until(lambda: not llm._check_health())
        with pytest.raises(standin.find("tensorrt_llm.executor", "EngineDeadError"), match="worker rank"):
            llm.generate_async(PROMPT, standin.params())


# ----------------------------------------------------------------------------------------------------------- statistics


async def statistics(llm: Any, timeout: float) -> list[dict[str, Any]]:  # noqa: ANN401 - an LLM
    return [entry async for entry in llm.get_stats_async(timeout)]


async def test_statistics_are_read_once(standin: Standin) -> None:
    llm = standin.llm(max_batch_size=3, kv_cache_config={"max_tokens": 640}, enable_iter_perf_stats=True)
    assert await statistics(llm, 0.05) == []  # nothing before the first request
    await llm.generate_async(PROMPT, standin.params(max_tokens=3))
    found = await statistics(llm, 0.3)
    assert [entry["iter"] for entry in found] == [1, 2, 3]
    assert {"maxNumBlocks": 20, "usedNumBlocks": 1, "tokensPerBlock": 32}.items() <= found[0]["kvCacheStats"].items()
    assert ("numQueuedContextRequests" in found[0]["inflightBatchingStats"]) is (standin.version == "1.3")
    assert await statistics(llm, 0.05) == []


async def test_statistics_of_1_2_raise_without_a_timeout(old: Standin) -> None:
    llm = old.llm()
    await llm.generate_async(PROMPT, old.params(max_tokens=1))
    with pytest.raises(asyncio.QueueEmpty):
        await anext(llm.get_stats_async(0))


async def test_statistics_of_1_3_block_the_event_loop(new: Standin) -> None:
    llm = new.llm(enable_iter_perf_stats=True)
    begun = time.monotonic()
    llm.get_stats_async(0.3)  # not awaited
    assert time.monotonic() - begun >= 0.3


# ----------------------------------------------------------------------------------------------------- compiled engines


def load(old: Standin, folder: Path, **kwargs: object) -> Any:  # noqa: ANN401 - an LLM
    llm = old.find("tensorrt_llm._tensorrt_engine", "LLM")(folder, skip_tokenizer_init=True, **kwargs)
    old.made.append(llm)
    return llm


async def test_compiled_engines_keep_the_limits_of_their_build(old: Standin, tmp_path: Path) -> None:
    llm = load(old, fill(tmp_path, ENGINE, RANKS), max_batch_size=1000, max_num_tokens=100, max_seq_len=9999)
    assert (llm.args.max_batch_size, llm.args.max_num_tokens, llm.args.max_seq_len) == (64, 100, 4096)
    params = old.params(repetition_penalty=1.2, max_tokens=2)  # its sampler supports everything
    assert await tokens(llm.generate_async([5, 5, 6], params)) == [5, 6]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_tokens": 4093}, r"should not exceed max_seq_len \(4096\)"),
        ({"logprobs": 1}, "requires `gather_generation_logits=True`"),
        ({"prompt_logprobs": 1}, "requires `gather_context_logits=True`"),
    ],
)
def test_compiled_engines_check_more(old: Standin, tmp_path: Path, fields: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        load(old, fill(tmp_path, ENGINE, RANKS)).generate_async(PROMPT, old.params(**fields))


# --------------------------------------------------------------------------------------------------------------- record


async def test_the_record_shows_what_arrived_and_how_it_ended(standin: Standin, set_up: SetUp, log: Path) -> None:
    set_up(fail_token=666)
    llm = standin.llm(max_batch_size=4, kv_cache_config={"max_tokens": 640})
    params = standin.params(seed=3, embedding_bias=[0.0, 0.0, 0.0, -1.5], max_tokens=2)
    await llm.generate_async(PROMPT, params, cache_salt="x")
    with pytest.raises(standin.request_error):
        await llm.generate_async([666], standin.params(), streaming=True)
    llm.shutdown()
    record = Log.read(log)
    arguments = record.of("llm")[0]["arguments"]
    assert (arguments["max_batch_size"], arguments["kv_cache_config"]) == (4, {"max_tokens": 640})
    first, second = record.of("request")
    plain = {"end_id": -1, "pad_id": -1, "max_tokens": 2, "detokenize": False}
    assert first["sampling"] == plain | {"seed": 3, "embedding_bias": {"3": -1.5}}
    assert (first["prompt"], first["with"]["cache_salt"], second["with"]["streaming"]) == (PROMPT, "x", True)
    assert (record.ends, record.unfinished) == ({"length": 1, "error": 1}, set())
