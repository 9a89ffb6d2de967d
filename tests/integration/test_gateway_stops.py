"""Stop strings over the gateway protocol: found in text, reported in tokens that are never taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer
from gateway_server import Answer, ask, echo, rest, serve_gateway, slow_echo
from grpc import StatusCode
from grpc.aio import AioRpcError
from tokenizers import Tokenizer

from text_generation_proto.gateway import trtllm_service_pb2 as pb


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return write_tokenizer(tmp_path)


async def echoed(tmp_path: Path, tokenizer: Tokenizer, text: str, **fields: object) -> Answer:
    """Return the answer for a prompt of `text`, which the engine echoes."""
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


async def test_a_prefix_of_a_stop_string_is_sent_after_a_mismatch(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answer = await echoed(tmp_path, tokenizer, "thre thro", stop=["three"])
    assert text_of(tokenizer, answer) == "thre throthre"
    assert answer.only.finish_reason == "length"
    assert answer.only.WhichOneof("matched_stop") is None


async def test_a_stop_string_that_begins_inside_a_token_stays(tmp_path: Path, tokenizer: Tokenizer) -> None:
    # "ab" is one token: cutting it would also drop the "a". The gateway cuts the text itself.
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


async def test_a_stop_string_frees_its_slot_while_other_sequences_of_the_call_wait(
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
    # The third sequence got the released slot.
    assert engine.releases[0] == (engine.admissions[2].slot, 2)
    assert [complete.matched_stop_str for complete in answer.completes] == ["stop", "stop"]


async def test_held_back_tokens_are_sent_after_an_abort(tmp_path: Path, tokenizer: Tokenizer) -> None:
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


async def test_an_unreadable_tokenizer_is_named_in_the_refusal(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    async with serve_gateway(echo(), tmp_path, model=tmp_path) as gateway:
        with pytest.raises(AioRpcError) as error:
            await gateway.stream(ask([5], 2, stop=["x"]))
    assert "cannot be read" in (error.value.details() or "")
