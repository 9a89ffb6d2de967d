"""Generate, as a gateway for TensorRT-LLM's gRPC server uses it: chunks, completes, log-probabilities, refusals."""

from __future__ import annotations

import math
from pathlib import Path

import grpc
import pytest
from byte_tokenizer import write_tokenizer
from caching_echo import CachingEcho
from gateway_server import ask, echo, serve_gateway, slow_echo

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_shard.config import ShardConfig

EOS = 9
Guide = pb.GuidedDecodingParams


async def test_chunks_have_new_tokens_and_complete_has_all(tmp_path: Path) -> None:
    async with serve_gateway(slow_echo(), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6, 7], 30, request_id="one"))
        whole = await gateway.stream(ask([5, 6], 3, streaming=False))
    assert answer.streamed() == list(answer.only.output_token_ids) == [5, 6, 7] * 10
    assert answer.only.finish_reason == "length"
    assert (answer.only.prompt_tokens, answer.only.completion_tokens) == (3, 30)
    sent = 0
    for chunk in answer.chunks:
        sent += len(chunk.token_ids)
        assert (chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens) == (3, sent, 0)
        assert not chunk.logprobs
    assert answer.request_ids == {"one"}
    assert (whole.chunks, list(whole.only.output_token_ids)) == ([], [5, 6, 5])


async def test_adapters_and_cached_tokens(tmp_path: Path) -> None:
    engine = CachingEcho.build(ShardConfig(lora_adapters="sql"))
    engine.found = 2
    async with serve_gateway(engine, tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6, 7], 4, lora_config=pb.LoraConfig(task_id=1)))
        whole = await gateway.stream(ask([5, 6, 7], 4, streaming=False))
    assert (list(answer.only.output_token_ids), answer.only.cached_tokens) == ([7, 6, 5, 7], 2)
    assert answer.chunks[-1].cached_tokens == 2
    assert (list(whole.only.output_token_ids), whole.only.cached_tokens) == ([5, 6, 7, 5], 2)


async def test_several_sequences_are_completed_in_order(tmp_path: Path) -> None:
    engine = echo()
    async with serve_gateway(engine, tmp_path) as gateway:
        config = pb.SamplingConfig(num_return_sequences=3, seed=(1 << 64) - 2)
        answer = await gateway.stream(ask([5, 6], 6, sampling_config=config))
    assert [complete.sequence_index for complete in answer.completes] == [0, 1, 2]
    for index, complete in enumerate(answer.completes):
        assert answer.streamed(index) == list(complete.output_token_ids) == [5, 6] * 3
    assert [admission.sampling.seed for admission in engine.admissions] == [(1 << 64) - 2, (1 << 64) - 1, 0]


async def test_ends(tmp_path: Path) -> None:
    """An EOS token stays in the output and is no match; a stop token is part of it on request."""
    async with serve_gateway(echo(info={"eos_token_ids": (EOS,)}), tmp_path) as gateway:
        for prompt, fields, expected, matched in (
            ([5, EOS, 7], {"stop_token_ids": [EOS]}, [5, EOS], None),
            ([5, 6, 7], {"stop_token_ids": [7, 8]}, [5, 6], 7),
            ([5, 6, 7], {"stop_token_ids": [7, 8], "include_stop_token_in_output": True}, [5, 6, 7], 7),
        ):
            answer = await gateway.stream(ask(prompt, 8, output_config=pb.OutputConfig(logprobs=0), **fields))
            assert list(answer.only.output_token_ids) == answer.streamed() == expected
            assert answer.only.finish_reason == "stop"
            assert (answer.only.matched_token_id if answer.only.WhichOneof("matched_stop") else None) == matched
            assert answer.only.completion_tokens == len(answer.only.logprobs) == len(expected)
            assert {(scored.logprob, len(scored.top_logprobs)) for scored in answer.only.logprobs} == {(-0.5, 0)}


async def test_log_probabilities_come_with_each_token(tmp_path: Path) -> None:
    async with serve_gateway(echo(tokens_per_report=3), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6], 7, output_config=pb.OutputConfig(logprobs=2)))
    # Multiples of three: a slow test may read two reports at once.
    assert all(len(chunk.token_ids) % 3 == 0 for chunk in answer.chunks[:-1])
    streamed = [scored for chunk in answer.chunks for scored in chunk.logprobs]
    for scores in (streamed, list(answer.only.logprobs)):
        assert [scored.token_id for scored in scores] == [5, 6, 5, 6, 5, 6, 5]
        assert {scored.logprob for scored in scores} == {-0.5}
        tops = [[(top.token_id, round(top.logprob, 3)) for top in scored.top_logprobs] for scored in scores]
        assert tops == [[(token, -0.5), (token + 1, -1.2)] for token in (5, 6, 5, 6, 5, 6, 5)]


async def test_the_prompts_log_probabilities_come_with_every_complete(tmp_path: Path) -> None:
    output, config = pb.OutputConfig(prompt_logprobs=1), pb.SamplingConfig(num_return_sequences=2)
    async with serve_gateway(echo(), tmp_path) as gateway:
        answer = await gateway.stream(ask([5, 6, 7], 2, sampling_config=config, output_config=output))
    assert len(answer.completes) == 2
    for complete in answer.completes:
        assert [scored.token_id for scored in complete.prompt_logprobs] == [5, 6, 7]
        assert math.isnan(complete.prompt_logprobs[0].logprob)
        assert [scored.logprob for scored in complete.prompt_logprobs[1:]] == [-0.5, -0.5]
        tops = [[top.token_id for top in scored.top_logprobs] for scored in complete.prompt_logprobs]
        assert tops == [[], [6], [7]]
        assert not complete.logprobs


async def test_a_guide_constrains_the_text(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    async with serve_gateway(echo(model_path=str(tmp_path)), tmp_path, model=tmp_path) as gateway:
        guide = Guide(guide_type=Guide.GUIDE_TYPE_JSON)
        answer = await gateway.stream(ask(tokenizer.encode("{").ids, 40, guided_decoding=guide))
    assert tokenizer.decode(answer.streamed()) == '{"": ""}'
    assert answer.only.finish_reason == "stop"


async def test_a_refusal_is_an_invalid_argument_and_affects_no_other_call(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    unusable = Guide(guide_type=Guide.GUIDE_TYPE_REGEX, guide="(")
    async with serve_gateway(echo(model_path=str(tmp_path), echo_blocks=2), tmp_path) as gateway:
        for request, message in (
            (ask([1], 2, bad=["word"]), "bad is not supported: bad_token_ids are served"),
            (ask([1, 2], 32), "prompt and new tokens exceed the engine's KV pool of 32 tokens"),
            (ask([1], 2, guided_decoding=unusable), "the grammar cannot be used"),
            (ask([5], 2, stop=["x"]), "stop is not supported: the model folder has no tokenizer.json"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await gateway.stream(request)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (error.value.details() or "").startswith(message)
            assert (await gateway.stream(ask([5, 6], 2))).streamed() == [5, 6]


async def test_the_error_of_a_large_request_arrives(tmp_path: Path) -> None:
    """gRPC clients replace a status of more than 16 KiB by RESOURCE_EXHAUSTED; characters take up to 12 bytes."""
    config = pb.KvCacheRetentionConfig(config_json=f'{{"{"😀" * 20_000}": 1}}')
    async with serve_gateway(echo(info={"retains": True}), tmp_path) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stream(ask([5, 6], 2, kv_cache_retention=config))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = str(caught.value.details())
    assert details.startswith("kv_cache_retention.config_json: ")
    assert len(details) == 500
