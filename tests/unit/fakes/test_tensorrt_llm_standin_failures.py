"""The stand-in for tensorrt_llm: cancels, failures, and ends of the engine."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from standin_loading import Standin, folder_of
from trtllm_standin.inspection import Log

PROMPT = [5, 6, 7, 8]
ENDLESS = 1_000_000
SetUp = Callable[..., None]


async def never_answers(result: Any) -> None:  # noqa: ANN401 - a RequestOutput
    """Nothing comes: waited for as long as a test can."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(result), 0.3)


async def until_ended(path: Path, reason: str, count: int = 1) -> None:
    """Until the stand-in has written so many ends of one kind."""
    while Log.read(path).ends[reason] < count:  # noqa: ASYNC110 - it is a file that another thread writes
        await asyncio.sleep(0.005)


@pytest.fixture
def log(tmp_path: Path, set_up: SetUp) -> Path:
    """Where the stand-in writes what happens."""
    path = tmp_path / "log.jsonl"
    set_up(log=path)
    return path


class TestAbort:
    @pytest.fixture(autouse=True)
    def _slow(self, set_up: SetUp) -> None:
        set_up(step_ms=1)

    async def test_one_that_runs_gets_a_last_item(self, standin: Standin) -> None:
        llm = standin.llm(max_seq_len=ENDLESS, kv_cache_config={"max_tokens": ENDLESS})
        result = llm.generate_async(PROMPT, standin.params(max_tokens=None), streaming=True)
        await anext(result)
        assert not result.aborted()
        result.abort()
        items = [item.outputs[0].finish_reason async for item in result]
        assert (items[-1], set(items[:-1]) - {None}, result.aborted(), result.finished) == (
            "cancelled",
            set(),
            True,
            True,
        )

    async def test_one_that_is_active_without_room_gets_it_too(self, standin: Standin) -> None:
        llm = standin.llm(kv_cache_config={"max_tokens": 4096}, max_seq_len=4096)
        running = llm.generate_async(PROMPT, standin.params(max_tokens=4092), streaming=True)
        await anext(running)
        starved = llm.generate_async(PROMPT, standin.params(), streaming=True)
        starved.abort()
        assert [(item.outputs[0].finish_reason, item.outputs[0].length) async for item in starved] == [("cancelled", 0)]
        running.abort()
        await running

    async def test_one_that_waits_is_never_answered(self, standin: Standin, log: Path) -> None:
        llm = standin.llm(max_batch_size=1)
        running = llm.generate_async(PROMPT, standin.params(max_tokens=20_000), streaming=True)
        await anext(running)
        waiting = llm.generate_async(PROMPT, standin.params(), streaming=True)
        waiting.abort()
        await until_ended(log, "dropped")
        await never_answers(waiting)
        running.abort()
        await running
        assert Log.read(log).unfinished == set()
        # What the library keeps of it stays until the shutdown.
        assert list(llm._executor._results) == [waiting.request_id]

    async def test_twice_or_too_late_is_harmless(self, standin: Standin) -> None:
        llm = standin.llm()
        result = await llm.generate_async(PROMPT, standin.params())
        result.abort()
        result.abort()
        assert result.outputs[0].finish_reason == "length"
        assert (await llm.generate_async(PROMPT, standin.params(max_tokens=1))).outputs[0].length == 1

    async def test_leaving_the_loop_stops_nothing(self, standin: Standin, log: Path) -> None:
        result = standin.llm().generate_async(PROMPT, standin.params(max_tokens=30), streaming=True)
        async for _ in result:
            break
        await until_ended(log, "length")

    async def test_after_the_llm_is_gone_it_is_an_attribute_error(self, standin: Standin) -> None:
        llm = standin.llm()
        result = await llm.generate_async(PROMPT, standin.params())
        llm.shutdown()
        gc.collect()
        with pytest.raises(AttributeError):
            result.abort()


class TestErrors:
    async def test_one_requests_error_ends_no_other(self, standin: Standin, set_up: SetUp) -> None:
        set_up(fail_token=666)
        llm = standin.llm()
        wrong = llm.generate_async([5, 6, 666], standin.params(), streaming=True)
        right = llm.generate_async(PROMPT, standin.params(), streaming=True)
        seen = []
        with pytest.raises(standin.request_error, match="666"):
            async for item in wrong:
                seen.append(list(item.outputs[0].token_ids))
        assert seen == [[5], [5, 6]]
        assert (await right).outputs[0].finish_reason == "length"
        # It is not marked as done, and to ask on is to wait for ever.
        assert not wrong.finished
        await never_answers(wrong)
        assert llm.generate(PROMPT, standin.params(max_tokens=1)).outputs[0].length == 1

    async def test_a_failed_step_fails_all_that_are_active_and_none_that_waits(
        self, standin: Standin, set_up: SetUp
    ) -> None:
        set_up(step_fail_token=666, step_ms=20)
        llm = standin.llm(max_batch_size=3)
        before = llm.generate_async(PROMPT, standin.params(max_tokens=20_000))
        # Half a second until it fails: time for the others to become active.
        bad = llm.generate_async([5] * 25 + [666], standin.params(max_tokens=30))
        behind = llm.generate_async(PROMPT, standin.params(max_tokens=20_000))
        waiting = llm.generate_async(PROMPT, standin.params(max_tokens=3))
        messages = set()
        for result in (before, bad, behind):
            with pytest.raises(standin.request_error) as caught:
                await result
            messages.add(str(caught.value))
        assert len(messages) == 1
        assert (await waiting).outputs[0].length == 3

    async def test_after_a_failed_step_the_loop_may_be_over(self, standin: Standin, set_up: SetUp) -> None:
        set_up(step_fail_token=666, step_fail_ends=1)
        llm = standin.llm()
        with pytest.raises(standin.request_error):
            await llm.generate_async([666], standin.params())
        assert llm._check_health()
        await never_answers(llm.generate_async(PROMPT, standin.params(), streaming=True))

    async def test_a_step_that_hangs_hangs_everything(self, standin: Standin, set_up: SetUp) -> None:
        set_up(hang_step_token=666, step_ms=1)
        llm = standin.llm()
        other = llm.generate_async(PROMPT, standin.params(max_tokens=20_000), streaming=True)
        await anext(other)
        stuck = llm.generate_async([5, 666], standin.params(), streaming=True)
        await anext(stuck)
        await never_answers(stuck)
        while other.aqueue.items:
            await anext(other)
        await never_answers(other)
        assert llm._check_health()
        standin.abandon(llm)

    async def test_the_engines_death_reaches_the_next_caller_alone(
        self, old: Standin, set_up: SetUp, log: Path
    ) -> None:
        set_up(fatal_token=666, step_ms=1)
        llm = old.llm()
        reader = llm.generate_async(PROMPT, old.params(max_tokens=20_000), streaming=True)
        await anext(reader)
        fatal = llm.generate_async([666], old.params(), streaming=True)
        while not llm._executor.errors:  # noqa: ASYNC110 - nobody is told: that is the point
            await asyncio.sleep(0.005)
        await never_answers(fatal)
        with pytest.raises(RuntimeError, match="666") as caught:
            llm.generate_async(PROMPT, old.params())
        assert not isinstance(caught.value, old.request_error)
        with pytest.raises(RuntimeError, match="LLM is shutting down"):
            llm.generate_async(PROMPT, old.params())
        # That was the shutdown: another has nothing to do.
        llm.shutdown()
        assert len(Log.read(log).of("shutdown")) == 1

    async def test_on_main_it_reaches_everybody(self, new: Standin, set_up: SetUp) -> None:
        set_up(fatal_token=666, step_ms=1)
        llm = new.llm()
        dead = new.find("tensorrt_llm.executor", "EngineDeadError")
        results = [llm.generate_async(prompt, new.params(max_tokens=20_000)) for prompt in (PROMPT, [666])]
        for result in results:
            with pytest.raises(dead, match="666"):
                await result
        assert not llm._check_health()
        with pytest.raises(dead):
            llm.generate_async(PROMPT, new.params())


class TestShutdown:
    async def test_it_aborts_what_runs(self, standin: Standin, set_up: SetUp, log: Path) -> None:
        set_up(step_ms=1)
        llm = standin.llm(max_batch_size=1)
        running = llm.generate_async(PROMPT, standin.params(max_tokens=20_000), streaming=True)
        await anext(running)
        waiting = llm.generate_async(PROMPT, standin.params(), streaming=True)
        await asyncio.to_thread(llm.shutdown)
        assert (await running).outputs[0].finish_reason == "cancelled"
        await never_answers(waiting)
        assert Log.read(log).ends == {"cancelled": 1, "dropped": 1}

    async def test_it_may_hang(self, standin: Standin, set_up: SetUp) -> None:
        set_up(hang_shutdown=1)
        llm = standin.llm()
        thread = threading.Thread(target=llm.shutdown, daemon=True)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        with pytest.raises(RuntimeError, match="LLM is shutting down"):
            llm.generate_async(PROMPT, standin.params())
        standin.abandon(llm)

    def test_it_may_hang_at_the_interpreters_exit(self, standin: Standin, set_up: SetUp) -> None:
        set_up(hang_shutdown=1)
        process = run(standin.version, "llm = LLM('m', skip_tokenizer_init=True); print('made', flush=True)")
        assert read_line(process) == "made"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()
        process.communicate()

    def test_else_it_ends_with_the_interpreter(self, standin: Standin) -> None:
        process = run(standin.version, "llm = LLM('m', skip_tokenizer_init=True)")
        assert process.wait(60) == 0
        process.communicate()


class TestWorkers:
    @pytest.fixture(autouse=True)
    def _with_workers(self, set_up: SetUp) -> None:
        set_up(workers=1)

    def workers(self, of: psutil.Process) -> list[psutil.Process]:
        """Its worker processes."""
        found = []
        for child in of.children(recursive=True):
            try:
                found += [child] if "mpi4py.futures.server" in child.cmdline() else []
            except psutil.NoSuchProcess:
                continue
        return found

    async def test_one_for_each_rank_that_ends_with_the_llm(self, standin: Standin) -> None:
        llm = standin.llm(tensor_parallel_size=2)
        workers = self.workers(psutil.Process())
        assert len(workers) == 2
        assert (await llm.generate_async(PROMPT, standin.params(max_tokens=2))).outputs[0].length == 2
        llm.shutdown()
        assert psutil.wait_procs(workers, timeout=60)[1] == []

    def test_none_without_a_worker_process(self, standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
        standin.llm(tensor_parallel_size=2)
        assert self.workers(psutil.Process()) == []

    async def test_the_death_of_one_is_not_noticed(self, old: Standin) -> None:
        llm = old.llm(tensor_parallel_size=2)
        self.workers(psutil.Process())[1].kill()
        while not llm._executor._engine._is_frozen:  # noqa: ASYNC110 - nobody is told: that is the point
            await asyncio.sleep(0.005)
        await never_answers(llm.generate_async(PROMPT, old.params(), streaming=True))
        assert llm._check_health()
        llm._executor._workers.stop()
        old.abandon(llm)

    async def test_on_main_it_is(self, new: Standin) -> None:
        llm = new.llm(tensor_parallel_size=2)
        self.workers(psutil.Process())[0].kill()
        while llm._check_health():  # noqa: ASYNC110 - as a caller has to
            await asyncio.sleep(0.005)
        with pytest.raises(new.find("tensorrt_llm.executor", "EngineDeadError"), match="worker rank"):
            llm.generate_async(PROMPT, new.params())

    def test_they_do_not_outlive_their_parent(self, standin: Standin) -> None:
        program = "llm = LLM('m', skip_tokenizer_init=True, tensor_parallel_size=2); print('made', flush=True); input()"
        process = run(standin.version, program)
        assert read_line(process) == "made"
        workers = self.workers(psutil.Process(process.pid))
        assert len(workers) == 2
        process.kill()
        process.communicate()
        assert psutil.wait_procs(workers, timeout=60)[1] == []


def run(version: str, program: str) -> subprocess.Popen[str]:
    """Run a program with the stand-in."""
    environment = {**os.environ, "PYTHONPATH": str(folder_of(version))}
    return subprocess.Popen(
        [sys.executable, "-c", f"from tensorrt_llm import LLM, SamplingParams; {program}"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
