"""Stop strings over the gateway protocol: found in text, reported in tokens that are never taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer
from gateway_server import Answer, ask, echo, rest, serve_gateway, slow_echo
from grpc.aio import AioRpcError
from tokenizers import Tokenizer

from text_generation_proto.gateway import trtllm_service_pb2 as pb

TWICE = pb.SamplingConfig(num_return_sequences=2)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return write_tokenizer(tmp_path)


def text_of(tokenizer: Tokenizer, answer: Answer, index: int = 0) -> str:
    assert answer.streamed(index) == list(answer.completes[index].output_token_ids)
    return str(tokenizer.decode(answer.streamed(index), skip_special_tokens=False))


async def test_a_stop_string_ends_the_sequence(tmp_path: Path, tokenizer: Tokenizer) -> None:
    keep, scored = {"include_stop_token_in_output": True}, pb.OutputConfig(logprobs=0)
    numbers = ["seven", "three", "thirteen"]
    async with serve_gateway(echo(tokens_per_report=2), tmp_path, model=tmp_path) as gateway:
        for text, stop, more, fields, expected, matched in (
            ("one, two, three, four", numbers, 4, {}, "one, two, ", "three"),
            ("one, two, three, four", numbers, 4, keep, "one, two, three", "three"),
            # A prefix of a stop string is sent after a mismatch.
            ("thre thro", ["three"], 4, {}, "thre throthre", ""),
            # "ab" is one token: cutting it would also drop the "a". The gateway cuts the text itself.
            ("xabcd", ["bc"], 4, {}, "xabc", "bc"),
            ("so<|other|>far", ["<|other|>"], 4, {}, "so", "<|other|>"),
            # A character of several tokens is held back whole.
            ("né à Paris", ["é à"], 4, {}, "n", "é à"),
            # A stop string on the last token wins over the length.
            ("well done", ["done"], 0, {}, "well ", "done"),
            # No stop string counts among the first min_tokens.
            ("no no no no", ["no"], 4, {"sampling_config": pb.SamplingConfig(min_tokens=5)}, "no no ", "no"),
        ):
            prompt = tokenizer.encode(text).ids
            request = ask(prompt, len(prompt) + more, stop=stop, output_config=scored, **fields)  # type: ignore[arg-type]
            answer = await gateway.stream(request)
            assert text_of(tokenizer, answer) == expected
            assert answer.only.matched_stop_str == matched
            assert answer.only.finish_reason == ("stop" if matched else "length")
            assert answer.only.completion_tokens == len(answer.only.logprobs) == len(answer.streamed())


async def test_a_stop_string_frees_its_slot_while_other_sequences_of_the_call_wait(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("go stop").ids
    engine = slow_echo(max_batch_size=2)
    async with serve_gateway(engine, tmp_path, model=tmp_path) as gateway:
        other = gateway.stub.Generate(ask([5], 30_000))
        await other.read()
        answer = await gateway.stream(ask(prompt, 20_000, stop=["stop"], sampling_config=TWICE))
        other.cancel()
    # The third sequence got the released slot.
    assert engine.releases[0] == (engine.admissions[2].slot, 2)
    assert [complete.matched_stop_str for complete in answer.completes] == ["stop", "stop"]
    assert [text_of(tokenizer, answer, index) for index in (0, 1)] == ["go ", "go "]


async def test_held_back_tokens_are_sent_after_an_abort(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("a").ids
    async with serve_gateway(slow_echo(), tmp_path, model=tmp_path) as gateway:
        call = gateway.stub.Generate(ask(prompt, 30_000, request_id="long", stop=["aaab"]))
        first = await call.read()
        assert isinstance(first, pb.GenerateResponse)
        await gateway.stub.Abort(pb.AbortRequest(request_id="long"))
        answer = await rest(call)
    assert [*first.chunk.token_ids, *answer.streamed()] == list(answer.only.output_token_ids)


async def test_an_unreadable_tokenizer_is_named_in_the_refusal(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    async with serve_gateway(echo(), tmp_path, model=tmp_path) as gateway:
        with pytest.raises(AioRpcError) as error:
            await gateway.stream(ask([5], 2, stop=["x"]))
    assert "cannot be read" in (error.value.details() or "")
