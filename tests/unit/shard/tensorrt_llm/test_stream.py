"""Updates of a stream, from the cumulative outputs of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest

from text_generation_proto.values import FailureCode, FinishReason, LogprobOptions, Stopping
from text_generation_shard.engine import NewSequence
from text_generation_shard.engines.tensorrt_llm.stream import Stream, StreamUpdate

EOS, STOP = 2, 5
SEQUENCE = NewSequence(
    slot=3,
    prompt=(11, 12, 13),
    stopping=Stopping(6, eos_token_ids=frozenset([EOS]), stop_token_ids=frozenset([STOP])),
    logprobs=LogprobOptions(tokens=True),
)


@dataclass
class Logprob:
    logprob: float
    rank: int = 1


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: list[object] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Output:
    """The same object is handed out each time."""

    completion: Completion = field(default_factory=Completion)

    @property
    def outputs(self) -> list[Completion]:
        return [self.completion]

    def say(self, *token_ids: int, reason: str | None = None, stop: int | None = None) -> Output:
        self.completion.token_ids += token_ids
        self.completion.logprobs += [{999: Logprob(-0.05), token: Logprob(-token / 10)} for token in token_ids]
        self.completion.finish_reason, self.completion.stop_reason = reason, stop
        return self


def read(stream: Stream, output: Output) -> StreamUpdate:
    update = stream.read(output)  # type: ignore[arg-type]
    assert update is not None
    return update


def test_tokens_are_reported_once() -> None:
    stream, output = Stream(SEQUENCE), Output()
    assert read(stream, output.say(7)).token_ids == [7]
    assert stream.read(output) is None  # type: ignore[arg-type]
    update = read(stream, output.say(8, 9))
    assert (update.token_ids, update.logprobs, update.is_end) == ([8, 9], [-0.8, -0.9], False)


@pytest.mark.parametrize(
    ("tokens", "reason", "reported", "finish"),
    [
        ((7, EOS), "stop", [7, EOS], FinishReason.EOS_TOKEN),
        ((7, STOP), "stop", [7, STOP], FinishReason.STOP_SEQUENCE),
        ((7, STOP, 8, 9), None, [7, STOP], FinishReason.STOP_SEQUENCE),  # the engine ignored it
        ((6, 7, 8, 9, 10, 11), "length", [6, 7, 8, 9, 10, 11], FinishReason.LENGTH),
        ((6, 7, 8, 9, 10, EOS), "stop", [6, 7, 8, 9, 10, EOS], FinishReason.LENGTH),
        ((6, 7, 8, 9, 10, 11, 12, 13), None, [6, 7, 8, 9, 10, 11], FinishReason.LENGTH),
    ],
    ids=["eos", "stop", "stop unseen", "length", "length wins", "too many"],
)
def test_ends(tokens: tuple[int, ...], reason: str | None, reported: list[int], finish: FinishReason) -> None:
    stream = Stream(SEQUENCE)
    update = read(stream, Output().say(*tokens, reason=reason))
    assert (update.token_ids, update.finish, update.failure) == (reported, finish, None)
    assert len(update.logprobs) == len(reported)
    assert stream.ended
    assert stream.ended_by_engine is (reason is not None)


def test_a_removed_stop_token_is_reported() -> None:
    stream, output = Stream(SEQUENCE), Output()
    read(stream, output.say(7, 8))
    output.completion.token_ids = [7]  # a stop sequence of two tokens, one of them reported
    output.completion.finish_reason, output.completion.stop_reason = "stop", STOP
    update = read(stream, output)
    assert (update.token_ids, update.finish) == ([STOP], FinishReason.STOP_SEQUENCE)
    assert math.isnan(update.logprobs[0])


def test_min_new_tokens() -> None:
    stream, output = Stream(replace(SEQUENCE, stopping=replace(SEQUENCE.stopping, min_new_tokens=3))), Output()
    update = read(stream, output.say(EOS, STOP, EOS))
    assert (update.token_ids, update.finish) == ([EOS, STOP, EOS], None)
    update = read(stream, output.say(7, EOS, 8))
    assert (update.token_ids, update.finish) == ([7, EOS], FinishReason.EOS_TOKEN)


@pytest.mark.parametrize(
    ("token", "stop", "finish"),
    [(EOS, None, FinishReason.EOS_TOKEN), (EOS, EOS, FinishReason.EOS_TOKEN), (STOP, STOP, FinishReason.STOP_SEQUENCE)],
    ids=["end_id", "another eos", "stop"],
)
def test_an_engine_may_stop_before_min_new_tokens(token: int, stop: int | None, finish: FinishReason) -> None:
    """The samplers hold off end_id only, and not always (PR #12166). The token is reported once."""
    stream, output = Stream(replace(SEQUENCE, stopping=replace(SEQUENCE.stopping, min_new_tokens=5))), Output()
    read(stream, output.say(7))
    update = read(stream, output.say(8, token, reason="stop", stop=stop))
    assert (update.token_ids, update.finish, update.failure) == ([8, token], finish, None)
    assert len(update.logprobs) == 2


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "length", "stop", "not_finished"])
def test_an_end_without_a_token_is_an_error(reason: str) -> None:
    stream, output = Stream(SEQUENCE), Output()
    read(stream, output.say(7))
    update = read(stream, output.say(reason=reason))
    assert update.finish is None
    assert update.failure is not None
    assert update.failure[0] is FailureCode.STEP


def test_nothing_is_reported_after_the_end() -> None:
    stream, output = Stream(SEQUENCE), Output()
    read(stream, output.say(EOS, reason="stop"))
    assert stream.read(output.say(8)) is None  # type: ignore[arg-type]
    assert stream.fail(FailureCode.STEP, "too late") is None


@pytest.mark.parametrize(
    ("reported", "expected"),
    [([{7: Logprob(-0.7)}], [-0.7, math.nan]), ([-0.5, -1.5], [-0.5, -1.5])],
    ids=["missing", "without rank"],
)
def test_logprobs(reported: list[object], expected: list[float]) -> None:
    output = Output().say(7, 8)
    output.completion.logprobs = reported
    assert read(Stream(SEQUENCE), output).logprobs == pytest.approx(expected, nan_ok=True)


def test_top_tokens_are_sorted() -> None:
    update = read(Stream(replace(SEQUENCE, logprobs=LogprobOptions(2))), Output().say(7))
    assert update.tops == [((999, 7), (-0.05, -0.7))]
    assert read(Stream(replace(SEQUENCE, logprobs=LogprobOptions(1))), Output().say(7)).tops == [((999,), (-0.05,))]


def test_prompt_logprobs_are_for_the_next_token() -> None:
    stream = Stream(replace(SEQUENCE, logprobs=LogprobOptions(prompt=True, prompt_top_n=1)))
    output = Output().say(7)
    output.completion.prompt_logprobs = [
        {12: Logprob(-1.2), 50: Logprob(-0.1)},
        {13: Logprob(-1.3)},
        {7: Logprob(-0.7)},
    ]
    scores = read(stream, output).prompt_scores
    assert scores is not None
    assert scores.logprobs == pytest.approx([math.nan, -1.2, -1.3], nan_ok=True)
    assert scores.tops == [((), ()), ((50,), (-0.1,)), ((13,), (-1.3,))]
    assert read(stream, output.say(8)).prompt_scores is None


@pytest.mark.parametrize(
    ("reported", "expected"),
    [([-1.2, -1.3, -0.7], [math.nan, -1.2, -1.3]), ([-1.3, -0.7], [math.nan, math.nan, -1.3])],
    ids=["whole prompt", "cached tokens have none"],
)
def test_prompt_logprobs_are_reported_with_a_token(reported: list[object], expected: list[float]) -> None:
    """Without a token there is no report."""
    stream, output = Stream(replace(SEQUENCE, logprobs=LogprobOptions(prompt=True))), Output()
    output.completion.prompt_logprobs = reported
    assert stream.read(output) is None  # type: ignore[arg-type]
    scores = read(stream, output.say(7)).prompt_scores
    assert scores is not None
    assert scores.logprobs == pytest.approx(expected, nan_ok=True)
