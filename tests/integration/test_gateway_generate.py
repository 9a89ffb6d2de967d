"""Generate as a gateway written for TensorRT-LLM's gRPC server uses it: chunks, completes, ends, log-probabilities."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from gateway_server import ask, echo, serve_gateway, slow_echo

from text_generation_proto.gateway import trtllm_service_pb2 as pb

EOS = 9


async def test_chunks_bring_what_is_new_and_complete_brings_the_whole(tmp_path: Path) -> None:
    async with serve_gateway(slow_echo(), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6, 7], 30, request_id="one"))
    assert answer.streamed() == [5, 6, 7] * 10
    assert list(answer.only.output_token_ids) == answer.streamed()
    assert answer.only.finish_reason == "length"
    assert answer.only.WhichOneof("matched_stop") is None
    assert (answer.only.prompt_tokens, answer.only.completion_tokens) == (3, 30)
    told = 0
    for chunk in answer.chunks:
        told += len(chunk.token_ids)
        assert (chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens) == (3, told, 0)
        assert not chunk.logprobs
    assert answer.request_ids == {"one"}


async def test_tokens_that_come_together_leave_together(tmp_path: Path) -> None:
    async with serve_gateway(echo(tokens_per_report=4), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6], 10))
    # Four at a time, unless a slow test has let two lots come before it read the first.
    assert all(len(chunk.token_ids) % 4 == 0 for chunk in answer.chunks[:-1])
    assert answer.streamed() == [5, 6] * 5


async def test_without_streaming_there_is_only_the_whole(tmp_path: Path) -> None:
    async with serve_gateway(echo(), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6], 3, streaming=False))
    assert not answer.chunks
    assert list(answer.only.output_token_ids) == [5, 6, 5]


async def test_several_sequences_are_told_apart_and_completed_in_order(tmp_path: Path) -> None:
    engine = echo()
    async with serve_gateway(engine, tmp_path) as gateway:
        config = pb.SamplingConfig(num_return_sequences=3, seed=(1 << 64) - 2)
        answer = await gateway.stream(ask([5, 6], 6, sampling_config=config))
    assert [complete.sequence_index for complete in answer.completes] == [0, 1, 2]
    for index, complete in enumerate(answer.completes):
        assert answer.streamed(index) == list(complete.output_token_ids) == [5, 6] * 3
    assert [admission.sampling.seed for admission in engine.admissions] == [(1 << 64) - 2, (1 << 64) - 1, 0]


async def test_more_sequences_than_slots_free_take_turns(tmp_path: Path) -> None:
    async with serve_gateway(slow_echo(max_batch_size=2), tmp_path) as gateway:
        one = gateway.stub.Generate(ask([1], 20000, request_id="one"))
        await one.read()
        config = pb.SamplingConfig(num_return_sequences=2)
        answer = await gateway.stream(ask([5, 6], 4, request_id="two", sampling_config=config))
        one.cancel()
    assert [list(complete.output_token_ids) for complete in answer.completes] == [[5, 6, 5, 6]] * 2


async def test_an_eos_token_stays_and_nothing_is_said_to_have_matched(tmp_path: Path) -> None:
    async with serve_gateway(echo(info={"eos_token_ids": (EOS,)}), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, EOS, 7], 8, stop_token_ids=[EOS]))
    assert list(answer.only.output_token_ids) == answer.streamed() == [5, EOS]
    assert answer.only.finish_reason == "stop"
    assert answer.only.WhichOneof("matched_stop") is None


async def test_eos_tokens_can_be_ignored_and_stop_tokens_still_stop(tmp_path: Path) -> None:
    async with serve_gateway(echo(info={"eos_token_ids": (EOS,)}), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, EOS, 7], 8, ignore_eos=True, stop_token_ids=[7]))
    assert list(answer.only.output_token_ids) == [5, EOS]
    assert answer.only.matched_token_id == 7


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_token_ends_the_sequence_and_is_part_of_it_only_if_asked_for(tmp_path: Path, keep: bool) -> None:
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


async def test_the_models_length_bounds_what_is_asked_for(tmp_path: Path) -> None:
    async with serve_gateway(echo(echo_max_sequence_length=16), tmp_path) as gateway:
        answer = await gateway.stream(ask([1, 2, 3], 2048))
    assert (len(answer.only.output_token_ids), answer.only.finish_reason) == (13, "length")


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


async def test_nothing_is_scored_that_was_not_asked_for(tmp_path: Path) -> None:
    async with serve_gateway(echo(), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6], 2))
    assert not answer.only.logprobs
    assert not answer.only.prompt_logprobs
