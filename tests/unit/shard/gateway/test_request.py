"""Conversion of gateway requests: the new sequence that each field gives, or the refusal by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from byte_tokenizer import write_tokenizer

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_proto.values import FinishReason, Grammar, GrammarKind, LogprobOptions, Sampling, Stopping
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineInfo, NewSequence, Retention, TopTokens
from text_generation_shard.engines.echo import EchoEngine
from text_generation_shard.gateway.call import GatewayCall
from text_generation_shard.gateway.request import CallFailed, read_request
from text_generation_shard.gateway.stop_strings import GatewayTokenizer

Guide = pb.GuidedDecodingParams
UNSET = pb.GenerateRequest()
INFO = replace(
    EchoEngine.build(ShardConfig(max_batch_size=8)).info, grammar_kinds=(GrammarKind.JSON_SCHEMA, GrammarKind.REGEX)
)


def request(prompt: list[int], new: int, overlay: pb.GenerateRequest = UNSET) -> pb.GenerateRequest:
    result = pb.GenerateRequest(request_id="r", tokenized=pb.TokenizedInput(input_token_ids=prompt), max_tokens=new)
    result.MergeFrom(overlay)
    return result


def read(overlay: pb.GenerateRequest, info: EngineInfo = INFO) -> NewSequence:
    """Return the only sequence of a request with a prompt of two tokens."""
    [sequence] = read_request(request([5, 6], 4, overlay), info).sequences
    return sequence


def refusal(request: pb.GenerateRequest, info: EngineInfo = INFO) -> str:
    with pytest.raises(CallFailed) as failed:
        read_request(request, info)
    assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return failed.value.message


def sampling(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(sampling_config=pb.SamplingConfig(**fields))  # type: ignore[arg-type]


def output(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(output_config=pb.OutputConfig(**fields))  # type: ignore[arg-type]


def guided(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(guided_decoding=Guide(**fields))  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("overlay", "expected"), SAMPLING, ids=lambda value: " ".join(str(value).split())[:70])
def test_sampling(overlay: pb.GenerateRequest, expected: Sampling) -> None:
    assert read(overlay).sampling == expected


def test_a_missing_seed_is_random() -> None:
    assert read(UNSET).sampling.seed != read(UNSET).sampling.seed


def test_bad_token_ids_become_a_logit_bias() -> None:
    sampling = read(pb.GenerateRequest(bad_token_ids=[9, 8, 9])).sampling
    assert (sampling.logit_bias_ids, sampling.logit_bias_values) == ((9, 8), (-100.0, -100.0))


def test_several_sequences_have_consecutive_seeds_and_score_the_prompt_once() -> None:
    overlay = sampling(num_return_sequences=3, seed=(1 << 64) - 2)
    overlay.MergeFrom(output(prompt_logprobs=1))
    sequences = read_request(request([5, 6], 4, overlay), INFO).sequences
    assert [sequence.sampling.seed for sequence in sequences] == [(1 << 64) - 2, (1 << 64) - 1, 0]
    assert [sequence.logprobs.prompt for sequence in sequences] == [True, False, False]


def test_max_tokens_is_reduced_to_the_positions_that_are_left() -> None:
    info = replace(INFO, max_sequence_length=16)
    [sequence] = read_request(request([1, 2, 3], 2048), info).sequences
    assert sequence.stopping.max_new_tokens == 13


def test_eos_tokens_are_the_engines_unless_ignored() -> None:
    info = replace(INFO, eos_token_ids=(9,))
    assert read(UNSET, info).stopping.eos_token_ids == {9}
    assert not read(pb.GenerateRequest(ignore_eos=True), info).stopping.eos_token_ids


REST = [
    (UNSET, Stopping(4), {}),
    (pb.GenerateRequest(stop_token_ids=[3, 3, 4]), Stopping(4, stop_token_ids=frozenset({3, 4})), {}),
    (sampling(min_tokens=2), Stopping(4, min_new_tokens=2), {}),
    (output(logprobs=3), Stopping(4), {"logprobs": LogprobOptions(3, tokens=True)}),
    (output(logprobs=0), Stopping(4), {"logprobs": LogprobOptions(tokens=True)}),
    (output(prompt_logprobs=2), Stopping(4), {"logprobs": LogprobOptions(prompt=True, prompt_top_n=2)}),
    (output(prompt_logprobs=0), Stopping(4), {"logprobs": LogprobOptions(prompt=True)}),
    (output(exclude_input_from_output=True), Stopping(4), {}),
    (pb.GenerateRequest(cache_salt_id=-7), Stopping(4), {"cache_salt": "-7"}),
    (pb.GenerateRequest(arrival_time=1.5), Stopping(4), {}),
    (pb.GenerateRequest(disaggregated_params=pb.DisaggregatedParams()), Stopping(4), {}),
]


@pytest.mark.parametrize(("overlay", "stopping", "fields"), REST, ids=lambda value: " ".join(str(value).split())[:70])
def test_other_fields(overlay: pb.GenerateRequest, stopping: Stopping, fields: dict[str, object]) -> None:
    sequence = read(overlay)
    assert sequence == NewSequence(0, (5, 6), stopping, sequence.sampling, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overlay", "grammar"),
    [
        (guided(guide_type=Guide.GUIDE_TYPE_REGEX, guide="true"), Grammar(GrammarKind.REGEX, "true")),
        (guided(guide_type=Guide.GUIDE_TYPE_JSON_SCHEMA, guide="{}"), Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        (
            guided(guide_type=Guide.GUIDE_TYPE_JSON),
            Grammar(GrammarKind.JSON_SCHEMA, '{"type": ["object", "array"]}'),
        ),
    ],
)
def test_guides(overlay: pb.GenerateRequest, grammar: Grammar) -> None:
    assert read(overlay).grammar == grammar


def test_an_adapter_is_named_by_its_place() -> None:
    info = replace(INFO, adapters=("sql", "french"))
    for task_id, adapter in ((0, ""), (1, "sql"), (2, "french")):
        assert read(pb.GenerateRequest(lora_config=pb.LoraConfig(task_id=task_id)), info).adapter == adapter
    for config in (
        pb.LoraConfig(task_id=3),
        pb.LoraConfig(task_id=-1),
        pb.LoraConfig(task_id=1, weights=b"w"),
        pb.LoraConfig(config_json="{}"),
    ):
        with pytest.raises(CallFailed, match="lora_config"):
            read(pb.GenerateRequest(lora_config=config), info)


def test_retention() -> None:
    info = replace(INFO, retains=True)

    def asked(text: str, policy: str = "") -> pb.GenerateRequest:
        config = pb.KvCacheRetentionConfig(config_json=text, policy=policy)
        return pb.GenerateRequest(kv_cache_retention=config)

    ranges = (
        '[{"token_start": 0, "token_end": 4, "priority": 90, "duration_ms": 500}, {"token_start": 4, "priority": 1}]'
    )
    full = f'{{"token_range_retention_configs": {ranges}, "decode_retention_priority": 10}}'
    assert read(asked(full), info).retention == Retention(((0, 4, 90, 500), (4, None, 1, None)), 10)
    assert read(asked("{}"), info).retention == Retention()
    for text in ("", "[]", '{"priority": 1}', '{"decode_retention_priority": 101}', full.replace("90", '"90"')):
        with pytest.raises(CallFailed, match=r"kv_cache_retention\.config_json: "):
            read(asked(text), info)
    with pytest.raises(CallFailed, match=r"kv_cache_retention\.policy"):
        read(asked("{}", "lru"), info)


def test_guides_of_xgrammar() -> None:
    info = replace(INFO, grammar_kinds=(GrammarKind.EBNF, GrammarKind.STRUCTURAL_TAG))
    ebnf = guided(guide_type=Guide.GUIDE_TYPE_EBNF_GRAMMAR, guide="root ::= 'a'")
    assert read(ebnf, info).grammar == Grammar(GrammarKind.EBNF, "root ::= 'a'")
    tag = guided(guide_type=Guide.GUIDE_TYPE_STRUCTURAL_TAG, guide="{}")
    assert read(tag, info).grammar == Grammar(GrammarKind.STRUCTURAL_TAG, "{}")


REFUSED = [
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


@pytest.mark.parametrize(
    ("message", "overlay"), REFUSED, ids=lambda value: value[:60] if isinstance(value, str) else ""
)
def test_unsupported_fields_are_refused_by_name(message: str, overlay: pb.GenerateRequest) -> None:
    assert refusal(request([5, 6], 4, overlay)).startswith(message)


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("tokenized is missing", pb.GenerateRequest(max_tokens=1)),
        ("tokenized.input_token_ids is empty", request([], 1)),
        ("tokenized.input_token_ids has 32768 tokens, which leaves no room for a new one", request([1] * 32768, 1)),
        ("a prompt token is outside the vocabulary", request([1 << 20], 1)),
        ("max_tokens must be at least 1", request([1], 0)),
    ],
)
def test_bad_prompts_are_refused(message: str, bad: pb.GenerateRequest) -> None:
    assert refusal(bad).startswith(message)


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


@pytest.mark.parametrize(
    ("field", "name", "overlay"), UNSUPPORTED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_parameters_that_this_engine_lacks_are_refused_by_the_requests_name(
    field: str, name: str, overlay: pb.GenerateRequest
) -> None:
    info = replace(INFO, unsupported=((field, "its sampler is too old"),))
    expected = f"{name} is not supported by this engine: its sampler is too old"
    assert refusal(request([5, 6], 4, overlay), info) == expected


def test_an_engine_without_seeds_serves_greedy_and_unseeded_requests() -> None:
    info = replace(INFO, unsupported=(("seed", "it has none"),))
    assert [read(overlay, info).sampling.seed for overlay in (sampling(seed=5, temperature=0), UNSET)] == [0, 0]


def test_an_engine_without_grammars_refuses_guides() -> None:
    overlay = guided(guide_type=Guide.GUIDE_TYPE_REGEX, guide="a")
    message = refusal(request([5, 6], 4, overlay), replace(INFO, grammar_kinds=()))
    assert message == "guided_decoding is not supported: this engine follows no regex"


def test_the_client_gets_n_top_tokens_although_engines_add_ties() -> None:
    call = GatewayCall(read_request(request([5, 6], 4, output(logprobs=1)), INFO), None)
    [result] = call.outputs
    result.add([7], [-0.5], [TopTokens(0, 0, (7, 8), (-0.5, -0.5))], FinishReason.LENGTH)
    [scored] = call.complete(result).complete.logprobs
    assert [top.token_id for top in scored.top_logprobs] == [7]


def test_the_text_of_an_end_or_stop_token_is_not_searched_for_stop_strings(tmp_path: Path) -> None:
    [token] = write_tokenizer(tmp_path).encode("x").ids
    asked = read_request(request([5, 6], 4, pb.GenerateRequest(stop=["x"])), INFO)
    for finish, matched in (
        (FinishReason.EOS_TOKEN, None),
        (FinishReason.STOP_SEQUENCE, token),
        (FinishReason.LENGTH, "x"),
    ):
        [result] = GatewayCall(asked, GatewayTokenizer.load(tmp_path)).outputs
        result.add([token], [-0.5], (), finish)
        assert (result.finish_reason, result.matched) == ("stop", matched)
