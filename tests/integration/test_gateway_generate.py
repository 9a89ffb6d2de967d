"""Generate, as a gateway for TensorRT-LLM's gRPC server uses it: chunks, completes, log-probabilities, refusals."""

from __future__ import annotations

import math
from pathlib import Path

import grpc
import pytest
from byte_tokenizer import write_tokenizer
from gateway_server import ask, echo, serve_gateway, slow_echo

from text_generation_proto.gateway import trtllm_service_pb2 as pb

EOS = 9
REGEX = pb.GuidedDecodingParams.GUIDE_TYPE_REGEX


async def test_chunks_have_new_tokens_and_complete_has_all(tmp_path: Path) -> None:
    async with serve_gateway(slow_echo(), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6, 7], 30, request_id="one"))
    assert answer.streamed() == [5, 6, 7] * 10
    assert list(answer.only.output_token_ids) == answer.streamed()
    assert answer.only.finish_reason == "length"
    assert answer.only.WhichOneof("matched_stop") is None
    assert (answer.only.prompt_tokens, answer.only.completion_tokens) == (3, 30)
    sent = 0
    for chunk in answer.chunks:
        sent += len(chunk.token_ids)
        assert (chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens) == (3, sent, 0)
        assert not chunk.logprobs
    assert answer.request_ids == {"one"}


async def test_tokens_reported_together_are_sent_together(tmp_path: Path) -> None:
    async with serve_gateway(echo(tokens_per_report=4), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6], 10))
    # Multiples of four: a slow test may read two reports at once.
    assert all(len(chunk.token_ids) % 4 == 0 for chunk in answer.chunks[:-1])
    assert answer.streamed() == [5, 6] * 5


async def test_without_streaming_there_is_only_complete(tmp_path: Path) -> None:
    async with serve_gateway(echo(), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6], 3, streaming=False))
    assert not answer.chunks
    assert list(answer.only.output_token_ids) == [5, 6, 5]


async def test_several_sequences_are_completed_in_order(tmp_path: Path) -> None:
    engine = echo()
    async with serve_gateway(engine, tmp_path) as gateway:
        config = pb.SamplingConfig(num_return_sequences=3, seed=(1 << 64) - 2)
        answer = await gateway.stream(ask([5, 6], 6, sampling_config=config))
    assert [complete.sequence_index for complete in answer.completes] == [0, 1, 2]
    for index, complete in enumerate(answer.completes):
        assert answer.streamed(index) == list(complete.output_token_ids) == [5, 6] * 3
    assert [admission.sampling.seed for admission in engine.admissions] == [(1 << 64) - 2, (1 << 64) - 1, 0]


async def test_sequences_wait_for_a_free_slot(tmp_path: Path) -> None:
    async with serve_gateway(slow_echo(max_batch_size=2), tmp_path) as gateway:
        one = gateway.stub.Generate(ask([1], 20000, request_id="one"))
        await one.read()
        config = pb.SamplingConfig(num_return_sequences=2)
        answer = await gateway.stream(ask([5, 6], 4, request_id="two", sampling_config=config))
        one.cancel()
    assert [list(complete.output_token_ids) for complete in answer.completes] == [[5, 6, 5, 6]] * 2


async def test_an_eos_token_stays_in_the_output_and_is_no_match(tmp_path: Path) -> None:
    async with serve_gateway(echo(info={"eos_token_ids": (EOS,)}), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, EOS, 7], 8, stop_token_ids=[EOS]))
    assert list(answer.only.output_token_ids) == answer.streamed() == [5, EOS]
    assert answer.only.finish_reason == "stop"
    assert answer.only.WhichOneof("matched_stop") is None


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_token_ends_the_sequence_and_is_part_of_it_on_request(tmp_path: Path, keep: bool) -> None:
    engine = echo()
    async with serve_gateway(engine, tmp_path) as gateway:
        answer = await gateway.stream(
            ask(
                [5, 6, 7],
                8,
                stop_token_ids=[7, 8],
                include_stop_token_in_output=keep,
                output_config=pb.OutputConfig(logprobs=0),
            )
        )
    expected = [5, 6, 7] if keep else [5, 6]
    assert list(answer.only.output_token_ids) == answer.streamed() == expected
    assert (answer.only.finish_reason, answer.only.matched_token_id) == ("stop", 7)
    assert answer.only.completion_tokens == len(answer.only.logprobs) == len(expected)


async def test_log_probabilities_come_with_each_token(tmp_path: Path) -> None:
    async with serve_gateway(echo(tokens_per_report=3), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6], 7, output_config=pb.OutputConfig(logprobs=2)))
    streamed = [scored for chunk in answer.chunks for scored in chunk.logprobs]
    for scores in (streamed, list(answer.only.logprobs)):
        assert [scored.token_id for scored in scores] == [5, 6, 5, 6, 5, 6, 5]
        assert {scored.logprob for scored in scores} == {-0.5}
        tops = [[(top.token_id, round(top.logprob, 3)) for top in scored.top_logprobs] for scored in scores]
        assert tops == [[(token, -0.5), (token + 1, -1.2)] for token in (5, 6, 5, 6, 5, 6, 5)]


async def test_zero_log_probabilities_are_those_of_the_chosen_tokens(tmp_path: Path) -> None:
    async with serve_gateway(echo(), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6], 2, output_config=pb.OutputConfig(logprobs=0)))
    assert [(scored.token_id, scored.logprob, len(scored.top_logprobs)) for scored in answer.only.logprobs] == [
        (5, -0.5, 0),
        (6, -0.5, 0),
    ]


async def test_the_prompts_log_probabilities_come_with_every_complete(tmp_path: Path) -> None:
    engine = echo()
    async with serve_gateway(engine, tmp_path) as gateway:
        answer = await gateway.stream(
            ask(
                [5, 6, 7],
                2,
                sampling_config=pb.SamplingConfig(num_return_sequences=2),
                output_config=pb.OutputConfig(prompt_logprobs=1),
            )
        )
    for complete in answer.completes:
        assert [scored.token_id for scored in complete.prompt_logprobs] == [5, 6, 7]
        assert math.isnan(complete.prompt_logprobs[0].logprob)
        assert [scored.logprob for scored in complete.prompt_logprobs[1:]] == [-0.5, -0.5]
        tops = [[top.token_id for top in scored.top_logprobs] for scored in complete.prompt_logprobs]
        assert tops == [[], [6], [7]]
        assert not complete.logprobs
    assert [admission.logprobs.prompt for admission in engine.admissions] == [True, False]  # it is scored once


async def test_a_guide_constrains_the_text(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    async with serve_gateway(echo(model_path=str(tmp_path)), tmp_path, model=tmp_path) as gateway:
        guide = pb.GuidedDecodingParams(guide_type=pb.GuidedDecodingParams.GUIDE_TYPE_JSON)
        answer = await gateway.stream(ask(tokenizer.encode("{").ids, 40, guided_decoding=guide))
    assert tokenizer.decode(answer.streamed()) == '{"": ""}'
    assert answer.only.finish_reason == "stop"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask([1], 2, bad=["word"]), "bad is not supported: bad_token_ids are served"),
        (ask([1, 2], 32), "prompt and new tokens exceed the engine's KV pool of 32 tokens"),
        (
            ask([1], 2, guided_decoding=pb.GuidedDecodingParams(guide_type=REGEX, guide="(")),
            "the grammar cannot be used",
        ),
    ],
    ids=["request", "engine", "grammar"],
)
async def test_a_refusal_is_an_invalid_argument_and_affects_no_other_call(
    tmp_path: Path, request_: pb.GenerateRequest, message: str
) -> None:
    write_tokenizer(tmp_path)
    async with serve_gateway(echo(model_path=str(tmp_path), echo_blocks=2), tmp_path) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.stream(request_)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.value.details() or "").startswith(message)
        assert (await gateway.stream(ask([5, 6], 2))).streamed() == [5, 6]
