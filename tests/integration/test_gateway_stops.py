"""Stop strings of the gateway protocol: found in text, told in tokens, and never in a chunk that would have to be taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer
from gateway_server import Answer, ask, echo, rest, serve_gateway, slow_echo
from grpc import StatusCode
from grpc.aio import AioRpcError
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_shard.gateway.stop_strings import StopStringFinder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return write_tokenizer(tmp_path)


async def echoed(tmp_path: Path, tokenizer: Tokenizer, text: str, **fields: object) -> Answer:
    """What becomes of a prompt of this text, repeated."""
    prompt = tokenizer.encode(text).ids
    async with serve_gateway(echo(tokens_per_report=2), tmp_path, model=tmp_path) as gateway:
        return await gateway.stream(ask(prompt, len(prompt) + 4, **fields))


def text_of(tokenizer: Tokenizer, answer: Answer) -> str:
    assert answer.streamed() == list(answer.only.output_token_ids)
    return tokenizer.decode(answer.streamed(), skip_special_tokens=False)


@pytest.mark.parametrize(("keep", "expected"), [(False, "one, two, "), (True, "one, two, three")])
async def test_a_stop_string_ends_the_sequence(tmp_path: Path, tokenizer: Tokenizer, keep: bool, expected: str) -> None:
    answer = await echoed(
        tmp_path,
        tokenizer,
        "one, two, three, four",
        stop=["seven", "three", "thirteen"],
        include_stop_token_in_output=keep,
        output_config=pb.OutputConfig(logprobs=0),
    )
    assert text_of(tokenizer, answer) == expected
    assert (answer.only.finish_reason, answer.only.matched_stop_str) == ("stop", "three")
    assert answer.only.completion_tokens == len(answer.only.logprobs) == len(answer.streamed())


async def test_a_beginning_that_comes_to_nothing_is_let_go(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answer = await echoed(tmp_path, tokenizer, "thre thro", stop=["three"])
    assert text_of(tokenizer, answer) == "thre throthre"
    assert answer.only.finish_reason == "length"
    assert answer.only.WhichOneof("matched_stop") is None


async def test_where_a_stop_string_begins_inside_a_token_its_tokens_stay(tmp_path: Path, tokenizer: Tokenizer) -> None:
    # One token is "ab": without it the "a" would be gone as well. Whoever cuts text finds the stop string in it.
    answer = await echoed(tmp_path, tokenizer, "xabcd", stop=["bc"])
    assert text_of(tokenizer, answer) == "xabc"
    assert answer.only.matched_stop_str == "bc"


async def test_a_control_token_can_be_a_stop_string(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answer = await echoed(tmp_path, tokenizer, "so<|other|>far", stop=["<|other|>"])
    assert text_of(tokenizer, answer) == "so"


async def test_a_character_of_several_tokens_is_held_back_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answer = await echoed(tmp_path, tokenizer, "né à Paris", stop=["é à"])
    assert text_of(tokenizer, answer) == "n"


async def test_a_stop_string_on_the_last_token_wins_over_the_length(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("well done").ids
    async with serve_gateway(echo(), tmp_path, model=tmp_path) as gateway:
        answer = await gateway.stream(ask(prompt, len(prompt), stop=["done"]))
    assert (text_of(tokenizer, answer), answer.only.finish_reason) == ("well ", "stop")


async def test_a_stop_string_frees_its_slot_at_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("go stop").ids
    async with serve_gateway(echo(max_batch_size=1), tmp_path, model=tmp_path) as gateway:
        first = await gateway.stream(ask(prompt, 20_000, stop=["stop"]))
        second = await gateway.stream(ask([5], 2))
    assert (text_of(tokenizer, first), second.streamed()) == ("go ", [5, 5])


async def test_a_stop_string_frees_its_slot_while_the_calls_other_sequences_wait(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("go stop").ids
    engine = slow_echo(max_batch_size=2)
    async with serve_gateway(engine, tmp_path, model=tmp_path) as gateway:
        other = gateway.stub.Generate(ask([5], 30_000))
        await other.read()
        config = pb.SamplingConfig(num_return_sequences=2)
        answer = await gateway.stream(ask(prompt, 20_000, stop=["stop"], sampling_config=config))
        other.cancel()
    # The slot that the third sequence got.
    assert engine.releases[0] == (engine.admissions[2].slot, 2)
    assert [complete.matched_stop_str for complete in answer.completes] == ["stop", "stop"]


async def test_what_is_held_back_leaves_with_an_abort(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("a").ids
    async with serve_gateway(slow_echo(), tmp_path, model=tmp_path) as gateway:
        call = gateway.stub.Generate(ask(prompt, 30_000, request_id="long", stop=["aaab"]))
        first = await call.read()
        assert isinstance(first, pb.GenerateResponse)
        await gateway.stub.Abort(pb.AbortRequest(request_id="long"))
        answer = await rest(call)
    assert [*first.chunk.token_ids, *answer.streamed()] == list(answer.only.output_token_ids)


async def test_no_stop_string_counts_among_the_first_min_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = pb.SamplingConfig(min_tokens=5)
    answer = await echoed(tmp_path, tokenizer, "no no no no", stop=["no"], sampling_config=config)
    assert text_of(tokenizer, answer) == "no no "


async def test_stop_strings_are_each_sequences_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = pb.SamplingConfig(num_return_sequences=2)
    answer = await echoed(tmp_path, tokenizer, "one two", stop=["two"], sampling_config=config)
    assert [complete.matched_stop_str for complete in answer.completes] == ["two", "two"]
    assert answer.streamed(0) == answer.streamed(1) == list(answer.completes[1].output_token_ids)


async def test_without_a_tokenizer_stop_strings_are_refused_by_name(tmp_path: Path) -> None:
    async with serve_gateway(echo(), tmp_path, model=tmp_path) as gateway:
        with pytest.raises(AioRpcError) as error:
            await gateway.stream(ask([5], 2, stop=["x"]))
        assert error.value.code() is StatusCode.INVALID_ARGUMENT
        assert (error.value.details() or "").startswith("stop is not supported: the model folder has no tokenizer.json")
        assert (await gateway.stream(ask([5], 2, stop_token_ids=[6]))).streamed() == [5, 5]


async def test_a_tokenizer_that_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    async with serve_gateway(echo(), tmp_path, model=tmp_path) as gateway:
        with pytest.raises(AioRpcError) as error:
            await gateway.stream(ask([5], 2, stop=["x"]))
    assert "cannot be read" in (error.value.details() or "")


# ---------------------------------------------------------------------------------------------------------- any text at all


def watched(pieces: list[str], stops: list[str], *, keep: bool) -> tuple[list[int], StopStringFinder]:
    """How many tokens may leave after each, with token i spelling pieces[i], until a stop string is found."""
    watch = StopStringFinder(stops, pieces.__getitem__, keep=keep)
    leaving: list[int] = []
    for token in range(len(pieces)):
        watch.feed(token)
        leaving.append(watch.sendable)
        if watch.matched is not None:
            break
    return leaving, watch


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """[start, end) of the match that completes first, the longest of several."""
    found = [(at + len(stop), -len(stop)) for stop in stops if (at := text.find(stop)) >= 0]
    return None if not found else (min(found)[0] + min(found)[1], min(found)[0])


pieces = st.lists(st.text("ab", max_size=3), max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


@given(pieces, stops, st.booleans())
def test_what_leaves_is_never_taken_back_and_the_first_match_ends_it(
    pieces: list[str], stops: list[str], keep: bool
) -> None:
    leaving, watch = watched(pieces, stops, keep=keep)
    text = "".join(pieces)
    match = first_match(text, stops)
    assert leaving == sorted(leaving)
    if match is None:
        assert watch.matched is None
        return
    start, end = match
    assert watch.matched == text[start:end]
    ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
    last = next(token for token, reached in enumerate(ends) if reached >= end)
    assert len(leaving) == last + 1
    begins = [token for token, reached in enumerate(ends) if pieces[token] and reached - len(pieces[token]) == start]
    if keep or not begins:
        assert watch.sendable == last + 1
    else:
        # Tokens that spell nothing go with the next that spells something.
        assert "".join(pieces[: watch.sendable]) == text[:start]


@given(pieces, stops)
def test_a_token_is_held_back_only_while_it_may_be_part_of_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    leaving, watch = watched(pieces, stops, keep=True)

    def known(count: int) -> str:
        return "".join(pieces[:count])

    for fed, left in enumerate(leaving[: -1 if watch.matched else None], 1):
        text = known(fed)
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        spelled = max((count for count in range(fed + 1) if len(known(count)) <= len(text) - held), default=0)
        # All that is spelled before the held end, but for tokens at its border that spell nothing.
        assert len(known(left)) == len(known(spelled))
