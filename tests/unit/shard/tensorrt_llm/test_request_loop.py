"""RequestLoop over the stand-in's LLM: updates are joined, aborted requests end, errors are told apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from standin import importable, model_folder, read_log
from trtllm_engines import constructed

from text_generation_proto.values import FailureCode, FinishReason, LogprobOptions, Stopping
from text_generation_shard.engine import NewSequence
from text_generation_shard.engines.tensorrt_llm.library import load_library
from text_generation_shard.engines.tensorrt_llm.lora import LoraRequests
from text_generation_shard.engines.tensorrt_llm.parameters import Parameters
from text_generation_shard.engines.tensorrt_llm.request_loop import RequestLoop
from text_generation_shard.engines.tensorrt_llm.stream import Stream, StreamUpdate

PROMPT = (100, 101, 102, 103)


class Requests:
    """A RequestLoop over an LLM, and the reasons why it called the engine broken."""

    def __init__(self, folder: Path, options: dict[str, object], stack: ExitStack) -> None:
        library = load_library()
        construction = constructed(library, folder, options)
        self.llm = library.llm(**construction.keywords)
        self.parameters = Parameters(library, construction.capabilities, 4096, (2,), LoraRequests(object, {}))
        self.broken: list[str] = []
        self.loop = RequestLoop(self.llm, library.request_error, self.broken.append)
        stack.callback(self.loop.close)
        stack.callback(lambda: self.llm.shutdown())
        stack.callback(self.loop.leave)  # the shutdown sends on sockets that are for one thread

    def start(self, new: int, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Stream:  # noqa: ANN401 - fields of NewSequence
        stream = Stream(NewSequence(0, prompt, Stopping(new), **fields))
        self.loop.start(stream, self.parameters.arguments(stream.sequence))
        return stream

    def read(self, stream: Stream) -> StreamUpdate:
        """Collect the stream to its end."""
        update = StreamUpdate()
        while not update.is_end:
            if (more := self.loop.collect(20).get(stream)) is not None:
                update.extend(more)
        return update

    def wait_until_read(self, return_when: str = asyncio.ALL_COMPLETED) -> None:
        """Wait until no request is read any more, or with FIRST_COMPLETED until one ends."""

        async def wait() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if tasks:
                await asyncio.wait(tasks, return_when=return_when)

        asyncio.run_coroutine_threadsafe(wait(), self.loop.loop).result(20)


@pytest.fixture
def make(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Requests]]:
    with ExitStack() as stack:

        def make(options: dict[str, object] | None = None, **settings: object) -> Requests:
            stack.enter_context(importable(version, monkeypatch, log=tmp_path / "log", **settings))
            return Requests(model_folder(tmp_path / "model"), options or {}, stack)

        yield make


Make = Callable[..., Requests]


def test_updates_are_joined_until_collected(make: Make) -> None:
    requests = make()
    requests.start(30, logprobs=LogprobOptions(2))
    requests.wait_until_read()
    (update,) = requests.loop.collect(20).values()
    assert update.token_ids == list(PROMPT * 8)[:30]
    assert len(update.logprobs) == len(update.tops) == 30
    assert update.finish is FinishReason.LENGTH


def test_a_dropped_request_is_aborted_and_discarded(make: Make, tmp_path: Path) -> None:
    requests = make(step_ms=2)
    stream = requests.start(2000)
    assert stream in requests.loop.collect(20)
    requests.loop.drop(stream)
    requests.wait_until_read()
    assert stream not in requests.loop.collect(0.05)
    assert stream not in requests.loop.collect(0.05)
    assert read_log(tmp_path / "log").ends == {"cancelled": 1}


def test_a_request_dropped_in_the_engines_queue_ends_with_its_first_token(make: Make, tmp_path: Path) -> None:
    """If it were aborted before, the library would never end its iteration, and keep its entries for ever."""
    requests = make({"max_batch_size": 1}, step_ms=2)
    running, queued = requests.start(2000), requests.start(50)
    while running not in requests.loop.collect(20):
        pass
    requests.loop.drop(queued)
    requests.loop.drop(running)
    requests.wait_until_read()
    assert read_log(tmp_path / "log").ends == {"cancelled": 2}
    assert requests.broken == []


def test_a_request_dropped_before_it_is_submitted_never_is(make: Make, tmp_path: Path) -> None:
    requests = make()
    stream = Stream(NewSequence(0, PROMPT, Stopping(5)))
    stream.dropped = True
    requests.loop.start(stream, requests.parameters.arguments(stream.sequence))
    assert requests.read(requests.start(3)).finish is FinishReason.LENGTH
    assert len(read_log(tmp_path / "log").of("request")) == 1


def test_a_sequence_that_ended_before_its_request_is_aborted(make: Make, version: str, tmp_path: Path) -> None:
    """With `ignore_eos`, 1.3 ignores stop tokens too: the stream finds the end, and the request would run on."""
    requests = make(step_ms=2)
    stream = Stream(NewSequence(0, PROMPT, Stopping(1000, stop_token_ids=frozenset([102]))))
    requests.loop.start(stream, requests.parameters.arguments(stream.sequence))
    update = requests.read(stream)
    assert (update.token_ids, update.finish) == ([100, 101, 102], FinishReason.STOP_SEQUENCE)
    requests.wait_until_read()
    assert len(read_log(tmp_path / "log").of("abort")) == (0 if version == "1.2" else 1)
    requests.llm.shutdown()
    assert read_log(tmp_path / "log").ends == ({"stop": 1} if version == "1.2" else {"cancelled": 1})


# ---------------------------------------------------------------------------------------------------------------- errors


def test_a_refused_request_is_invalid(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a worker process the library refuses in `generate_async`; with one, when the result is read."""
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    requests = make()
    update = requests.read(requests.start(0))
    assert update.failure is not None
    assert update.failure[0] is FailureCode.INVALID
    assert "`max_tokens` (0) must be greater than 0" in update.failure[1]
    assert requests.broken == []


def test_an_argument_of_the_wrong_type_is_invalid(make: Make) -> None:
    requests = make()
    stream = Stream(NewSequence(0, PROMPT, Stopping(5)))
    requests.loop.start(stream, {"inputs": 7, "sampling_params": None, "streaming": True})
    update = requests.read(stream)
    assert update.failure is not None
    assert update.failure[0] is FailureCode.INVALID
    assert requests.broken == []


def test_any_other_error_breaks_the_engine(make: Make) -> None:
    requests = make()
    requests.llm.shutdown()
    update = requests.read(requests.start(5))
    assert update.failure == (FailureCode.STEP, "LLM is shutting down")
    assert requests.broken == ["RuntimeError: LLM is shutting down"]


class Raising:
    """An LLM whose requests fail when they are read."""

    async def generate_async(self, **_: object) -> AsyncIterator[Any]:
        raise ValueError("no such position")
        yield


def test_an_output_that_cannot_be_read_is_told_to_the_engine() -> None:
    broken: list[str] = []
    loop = RequestLoop(Raising(), RuntimeError, broken.append)  # type: ignore[arg-type]
    stream = Stream(NewSequence(0, PROMPT, Stopping(5)))
    loop.start(stream, {})
    update = loop.collect(20)[stream]
    loop.close()
    assert update.failure == (FailureCode.STEP, "no such position")
    assert (broken, loop.has_read_error) == ([], True)


@pytest.mark.parametrize("version", ["1.2"], indirect=True)  # 1.3 no longer asserts
def test_an_error_of_an_aborted_request_breaks_nothing(make: Make) -> None:
    """1.2.1 asserts that the last token of a cancelled request has log-probabilities."""
    requests = make(step_ms=2, cancel_with_token=1)
    stream = requests.start(2000)
    assert stream in requests.loop.collect(20)
    requests.loop.drop(stream)
    requests.wait_until_read()
    assert requests.broken == []


def test_probe(make: Make) -> None:
    requests = make(hang_step_token=777, fail_token=778)
    fine, failing, hanging = (
        requests.parameters.arguments(NewSequence(0, (5, token), Stopping(5))) for token in (6, 778, 777)
    )
    assert requests.loop.probe(fine, 20, lambda: None) is None
    assert "RequestError: token 778" in str(requests.loop.probe(failing, 20, lambda: None))
    assert requests.loop.probe(hanging, 3600, lambda: "its worker died") == "its worker died"
    assert "did not come within" in str(requests.loop.probe(hanging, 0.01, lambda: None))
    requests.llm.shutdown = lambda: None  # it would wait for the engine forever
