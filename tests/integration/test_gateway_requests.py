"""Each field of a gateway's request: what reaches the engine, or the name by which it is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from byte_tokenizer import write_tokenizer
from gateway_server import Gateway, RecordingEcho, ask, echo, serve_gateway

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_proto.values import Grammar, GrammarKind, LogprobOptions, Sampling, Stopping
from text_generation_shard.engine import NewSequence

UNSET = pb.GenerateRequest()
Guide = pb.GuidedDecodingParams


def sampling(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(sampling_config=pb.SamplingConfig(**fields))  # type: ignore[arg-type]


def output(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(output_config=pb.OutputConfig(**fields))  # type: ignore[arg-type]


def guided(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(guided_decoding=Guide(**fields))  # type: ignore[arg-type]


def with_(overlay: pb.GenerateRequest, prompt: list[int] | None = None, new: int = 4) -> pb.GenerateRequest:
    request = ask([5, 6] if prompt is None else prompt, new)
    request.MergeFrom(overlay)
    return request


@pytest.fixture
def engine(tmp_path: Path) -> RecordingEcho:
    write_tokenizer(tmp_path)
    return echo(model_path=str(tmp_path), max_batch_size=8)


@pytest.fixture
async def gateway(tmp_path: Path, engine: RecordingEcho) -> AsyncIterator[Gateway]:
    async with serve_gateway(engine, tmp_path, model=tmp_path) as served:
        yield served


# ------------------------------------------------------------------------------------------------------------- what arrives

DRAWN = {"greedy": False}
SAMPLING = [
    (sampling(seed=3), Sampling(**DRAWN, seed=3)),  # what is unset is neutral: it samples, at temperature 1
    (sampling(seed=3, temperature=0.5), Sampling(**DRAWN, seed=3, temperature=0.5)),
    (sampling(seed=3, top_p=0.25), Sampling(**DRAWN, seed=3, top_p=0.25)),
    (sampling(seed=3, top_k=7), Sampling(**DRAWN, seed=3, top_k=7)),
    (sampling(seed=3, top_k=0), Sampling(**DRAWN, seed=3)),
    (sampling(seed=3, min_p=0.125), Sampling(**DRAWN, seed=3, min_p=0.125)),
    (sampling(seed=3, repetition_penalty=1.5), Sampling(**DRAWN, seed=3, repetition_penalty=1.5)),
    (sampling(seed=3, presence_penalty=-1.5), Sampling(**DRAWN, seed=3, output_presence_penalty=-1.5)),
    (sampling(seed=3, frequency_penalty=0.5), Sampling(**DRAWN, seed=3, output_frequency_penalty=0.5)),
    (
        sampling(seed=3, presence_penalty=1, prompt_ignore_length=2),
        Sampling(**DRAWN, seed=3, output_presence_penalty=1),
    ),
    (sampling(temperature=0), Sampling()),
    (sampling(temperature=0, top_p=0.5, seed=4), Sampling()),
    (sampling(top_k=1), Sampling()),
    (sampling(top_p=0), Sampling()),
    (sampling(temperature=0, repetition_penalty=1.5), Sampling(repetition_penalty=1.5)),
    (sampling(temperature=0, beam_width=1, num_return_sequences=1), Sampling()),
]


@pytest.mark.parametrize(("overlay", "expected"), SAMPLING, ids=lambda one: " ".join(str(one).split())[:70])
async def test_sampling_arrives_as_it_was_meant(
    gateway: Gateway, engine: RecordingEcho, overlay: pb.GenerateRequest, expected: Sampling
) -> None:
    await gateway.stream(with_(overlay))
    [admission] = engine.admissions
    assert admission.sampling == expected


async def test_a_seed_that_is_not_given_is_drawn(gateway: Gateway, engine: RecordingEcho) -> None:
    for _ in range(2):
        await gateway.stream(with_(UNSET))
    first, second = (admission.sampling.seed for admission in engine.admissions)
    assert first != second


async def test_tokens_to_avoid_are_biased_against(gateway: Gateway, engine: RecordingEcho) -> None:
    await gateway.stream(with_(pb.GenerateRequest(bad_token_ids=[9, 8, 9])))
    [admission] = engine.admissions
    assert (admission.sampling.logit_bias_ids, admission.sampling.logit_bias_values) == ((9, 8), (-100.0, -100.0))


REST = [
    (UNSET, Stopping(4), {}),
    (pb.GenerateRequest(stop_token_ids=[3, 3, 4]), Stopping(4, stop_token_ids=frozenset({3, 4})), {}),
    (sampling(min_tokens=2), Stopping(4, min_new_tokens=2), {}),
    (output(logprobs=3), Stopping(4), {"logprobs": LogprobOptions(3)}),
    (output(logprobs=0), Stopping(4), {}),
    (output(prompt_logprobs=2), Stopping(4), {"logprobs": LogprobOptions(prompt=True, prompt_top_n=2)}),
    (output(prompt_logprobs=0), Stopping(4), {"logprobs": LogprobOptions(prompt=True)}),
    (output(exclude_input_from_output=True), Stopping(4), {}),
    (pb.GenerateRequest(cache_salt_id=-7), Stopping(4), {"cache_salt": "-7"}),
    (pb.GenerateRequest(arrival_time=1.5), Stopping(4), {}),
    (pb.GenerateRequest(disaggregated_params=pb.DisaggregatedParams()), Stopping(4), {}),
]


@pytest.mark.parametrize(("overlay", "stopping", "fields"), REST, ids=lambda one: " ".join(str(one).split())[:70])
async def test_everything_else_arrives_as_it_was_meant(
    gateway: Gateway,
    engine: RecordingEcho,
    overlay: pb.GenerateRequest,
    stopping: Stopping,
    fields: dict[str, object],
) -> None:
    await gateway.stream(with_(overlay))
    [admission] = engine.admissions
    expected = NewSequence(admission.slot, (5, 6), stopping, admission.sampling, **fields)  # type: ignore[arg-type]
    assert admission == expected


GUIDES = [
    (guided(guide_type=Guide.GUIDE_TYPE_REGEX, guide="true"), Grammar(GrammarKind.REGEX, "true"), "true"),
    (
        guided(guide_type=Guide.GUIDE_TYPE_JSON_SCHEMA, guide='{"const": "b"}'),
        Grammar(GrammarKind.JSON_SCHEMA, '{"const": "b"}'),
        '"b"',
    ),
    (
        guided(guide_type=Guide.GUIDE_TYPE_JSON),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": ["object", "array"]}'),
        '{"": ""}',
    ),
]


@pytest.mark.parametrize(("overlay", "grammar", "spelled"), GUIDES)
async def test_guides_are_followed(
    tmp_path: Path,
    gateway: Gateway,
    engine: RecordingEcho,
    overlay: pb.GenerateRequest,
    grammar: Grammar,
    spelled: str,
) -> None:
    tokenizer = write_tokenizer(tmp_path)
    prompt = tokenizer.encode("{").ids
    answer = await gateway.stream(with_(overlay, prompt, 40))
    assert engine.admissions[0].grammar == grammar
    assert tokenizer.decode(answer.streamed()) == spelled
    assert answer.only.finish_reason == "stop"


# ------------------------------------------------------------------------------------------------------------- what does not

REFUSED = [
    ("lora_config is not supported", pb.GenerateRequest(lora_config=pb.LoraConfig(task_id=1))),
    ("prompt_tuning_config is not supported", pb.GenerateRequest(prompt_tuning_config=pb.PromptTuningConfig())),
    ("multimodal_input is not supported", pb.GenerateRequest(multimodal_input=pb.MultimodalInput(image_data=[b"x"]))),
    ("kv_cache_retention is not supported", pb.GenerateRequest(kv_cache_retention=pb.KvCacheRetentionConfig())),
    ("lookahead_config is not supported", pb.GenerateRequest(lookahead_config=pb.LookaheadConfig(max_ngram_size=2))),
    (
        "disaggregated_params is not supported",
        pb.GenerateRequest(
            disaggregated_params=pb.DisaggregatedParams(request_type=pb.DisaggregatedParams.REQUEST_TYPE_CONTEXT_ONLY)
        ),
    ),
    ("embedding_bias is not supported", pb.GenerateRequest(embedding_bias=[0.0])),
    ("bad is not supported", pb.GenerateRequest(bad=["word"])),
    (
        "tokenized.query_token_ids is not supported",
        pb.GenerateRequest(tokenized=pb.TokenizedInput(query_token_ids=[1])),
    ),
    ("sampling_config.top_p_min is not supported", sampling(top_p_min=0.1)),
    ("sampling_config.top_p_reset_ids is not supported", sampling(top_p_reset_ids=1)),
    ("sampling_config.top_p_decay is not supported", sampling(top_p_decay=0.5)),
    ("sampling_config.beam_search_diversity_rate is not supported", sampling(beam_search_diversity_rate=0.5)),
    ("sampling_config.length_penalty is not supported", sampling(length_penalty=1.0)),
    ("sampling_config.early_stopping is not supported", sampling(early_stopping=1)),
    ("sampling_config.no_repeat_ngram_size is not supported", sampling(no_repeat_ngram_size=3)),
    ("sampling_config.beam_width is not supported", sampling(beam_width=2)),
    ("sampling_config.beam_width is not supported", sampling(beam_width=-1)),
    ("sampling_config.beam_width_array is not supported", sampling(beam_width_array=[1])),
    ("sampling_config.prompt_ignore_length is not supported", sampling(prompt_ignore_length=1)),
    ("output_config.return_context_logits is not supported", output(return_context_logits=True)),
    ("output_config.return_generation_logits is not supported", output(return_generation_logits=True)),
    ("output_config.return_encoder_output is not supported", output(return_encoder_output=True)),
    ("output_config.return_perf_metrics is not supported", output(return_perf_metrics=True)),
    ("guided_decoding is not supported", guided()),
    ("guided_decoding is not supported", guided(guide_type=Guide.GUIDE_TYPE_EBNF_GRAMMAR, guide="root ::= 'a'")),
    ("guided_decoding is not supported", guided(guide_type=Guide.GUIDE_TYPE_STRUCTURAL_TAG, guide="{}")),
    ("the grammar cannot be used", guided(guide_type=Guide.GUIDE_TYPE_REGEX, guide="(")),
    ("sampling_config.num_return_sequences is at most 8", sampling(num_return_sequences=9)),
    ("sampling_config.temperature must be finite and at least 0", sampling(temperature=-0.5)),
    ("sampling_config.temperature must be finite and at least 0", sampling(temperature=float("nan"))),
    ("sampling_config.temperature must be finite and at least 0", sampling(temperature=float("inf"))),
    ("sampling_config.top_p must be in [0, 1]", sampling(top_p=1.5)),
    ("sampling_config.min_p must be in [0, 1]", sampling(min_p=-0.5)),
    ("sampling_config.top_k is at least 0", sampling(top_k=-1)),
    ("sampling_config.repetition_penalty is more than 0", sampling(repetition_penalty=0)),
    ("sampling_config.presence_penalty must be in [-2, 2]", sampling(presence_penalty=2.5)),
    ("sampling_config.frequency_penalty must be in [-2, 2]", sampling(frequency_penalty=-3)),
    ("sampling_config.min_tokens is at most max_tokens, here 4. Given: 5", sampling(min_tokens=5)),
    ("output_config.logprobs is 0 to 20", output(logprobs=21)),
    ("output_config.logprobs is 0 to 20", output(logprobs=-1)),
    ("output_config.prompt_logprobs is 0 to 20", output(prompt_logprobs=21)),
    ("stop: a stop string has 1 to 4096 characters", pb.GenerateRequest(stop=[""])),
    ("stop: a stop string has 1 to 4096 characters", pb.GenerateRequest(stop=["x" * 4097])),
    ("stop holds at most 64 strings", pb.GenerateRequest(stop=[str(number) for number in range(65)])),
    ("bad_token_ids holds at most 1024 tokens", pb.GenerateRequest(bad_token_ids=range(1025))),
    ("bad_token_ids: a token is outside the vocabulary of 1048576", pb.GenerateRequest(bad_token_ids=[1 << 20])),
]


async def refusal(gateway: Gateway, request: pb.GenerateRequest) -> str:
    """Why the request is refused; that one refused costs nobody anything is checked as well."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await gateway.stream(request)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await gateway.stream(ask([5, 6], 2))).streamed() == [5, 6]
    return error.value.details() or ""


@pytest.mark.parametrize(("message", "overlay"), REFUSED, ids=lambda one: one[:60] if isinstance(one, str) else "")
async def test_what_cannot_be_served_is_refused_by_name(
    gateway: Gateway, message: str, overlay: pb.GenerateRequest
) -> None:
    assert (await refusal(gateway, with_(overlay))).startswith(message)


@pytest.mark.parametrize(
    ("message", "request_"),
    [
        ("tokenized is missing", pb.GenerateRequest(max_tokens=1)),
        ("tokenized.input_token_ids is empty", ask([], 1)),
        ("tokenized.input_token_ids has 32768 tokens, which leaves no room for a new one", ask([1] * 32768, 1)),
        ("a prompt token is outside the vocabulary", ask([1 << 20], 1)),
        ("max_tokens must be at least 1", ask([1], 0)),
    ],
)
async def test_a_prompt_that_cannot_be_served_is_refused(
    gateway: Gateway, message: str, request_: pb.GenerateRequest
) -> None:
    assert (await refusal(gateway, request_)).startswith(message)


UNSUPPORTED = [
    ("temperature", "sampling_config.temperature", sampling(temperature=0.5)),
    ("top_k", "sampling_config.top_k", sampling(top_k=5)),
    ("top_p", "sampling_config.top_p", sampling(top_p=0.5)),
    ("min_p", "sampling_config.min_p", sampling(min_p=0.5)),
    ("repetition_penalty", "sampling_config.repetition_penalty", sampling(repetition_penalty=2)),
    ("output_frequency_penalty", "sampling_config.frequency_penalty", sampling(frequency_penalty=1)),
    ("output_presence_penalty", "sampling_config.presence_penalty", sampling(presence_penalty=1)),
    ("seed", "sampling_config.seed", sampling(seed=0)),
    ("logit_bias_ids", "bad_token_ids", pb.GenerateRequest(bad_token_ids=[1])),
    ("stop_token_ids", "stop_token_ids", pb.GenerateRequest(stop_token_ids=[1])),
    ("min_new_tokens", "sampling_config.min_tokens", sampling(min_tokens=1)),
    ("top_n", "output_config.logprobs", output(logprobs=0)),
    ("prompt", "output_config.prompt_logprobs", output(prompt_logprobs=0)),
    ("prompt_top_n", "output_config.prompt_logprobs", output(prompt_logprobs=1)),
    ("cache_salt", "cache_salt_id", pb.GenerateRequest(cache_salt_id=0)),
]


@pytest.mark.parametrize(("field", "name", "overlay"), UNSUPPORTED, ids=lambda one: one if isinstance(one, str) else "")
async def test_what_this_engine_cannot_honour_is_refused_by_the_requests_name(
    tmp_path: Path, field: str, name: str, overlay: pb.GenerateRequest
) -> None:
    engine = echo(info={"unsupported": ((field, "its sampler is too old"),)})
    async with serve_gateway(engine, tmp_path) as gateway:
        assert (
            await refusal(gateway, with_(overlay)) == f"{name} is not supported by this engine: its sampler is too old"
        )


async def test_a_seed_is_not_missed_where_nothing_is_drawn(tmp_path: Path) -> None:
    engine = echo(info={"unsupported": (("seed", "it has none"),)})
    async with serve_gateway(engine, tmp_path) as gateway:
        assert (await gateway.stream(with_(sampling(seed=5, temperature=0)))).streamed() == [5, 6, 5, 6]
        assert (await gateway.stream(with_(UNSET))).streamed() == [5, 6, 5, 6]
    assert [admission.sampling.seed for admission in engine.admissions] == [0, 0]


async def test_grammars_of_an_engine_that_has_none_are_refused(tmp_path: Path) -> None:
    async with serve_gateway(echo(), tmp_path) as gateway:
        overlay = guided(guide_type=Guide.GUIDE_TYPE_REGEX, guide="a")
        assert (
            await refusal(gateway, with_(overlay)) == "guided_decoding is not supported: this engine follows no regex"
        )


async def test_what_only_the_engine_can_tell_is_a_refusal_as_well(tmp_path: Path) -> None:
    async with serve_gateway(echo(echo_blocks=2), tmp_path) as gateway:
        message = await refusal(gateway, ask([1, 2], 32))
    assert message == "prompt and new tokens exceed the engine's KV pool of 32 tokens"
