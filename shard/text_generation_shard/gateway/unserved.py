"""What the gateway's requests can ask for and engines here have no words for: refused by name, never dropped in silence.

TensorRT-LLM's own server drops some of these (NVIDIA/TensorRT-LLM, tensorrt_llm/grpc/smg: kv_cache_retention,
lookahead_config, prompt_ignore_length, return_perf_metrics, cache_salt_id are not read there). A client that sends one
gets another answer than it asked for, and does not learn it.
"""

from __future__ import annotations

from collections.abc import Iterator

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_shard.gateway.errors import refused

_NO_BEAMS = "beam search is not served"
_NO_TENSORS = "logits and hidden states are not sent"

_REQUEST = {
    "lora_config": "adapters are not served",
    "prompt_tuning_config": "prompt tuning is not served",
    "multimodal_input": "prompts are of tokens alone",
    "kv_cache_retention": "what is cached is the engine's choice",
    "lookahead_config": "speculation is set up when the engine is built",
}
"""Optional fields: refused whenever they are there."""
_SAMPLING = {
    "top_p_min": "top_p does not decay",
    "top_p_reset_ids": "top_p does not decay",
    "top_p_decay": "top_p does not decay",
    "beam_search_diversity_rate": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "no_repeat_ngram_size": "repetition_penalty, presence_penalty and frequency_penalty are served",
}
_GUIDES = {
    pb.GuidedDecodingParams.GUIDE_TYPE_UNSPECIFIED: "guide_type is not set",
    pb.GuidedDecodingParams.GUIDE_TYPE_EBNF_GRAMMAR: "EBNF grammars are not served",
    pb.GuidedDecodingParams.GUIDE_TYPE_STRUCTURAL_TAG: "structural tags are not served",
}


def check_served(request: pb.GenerateRequest) -> None:
    """Raises CallFailed for the first field that asks for something no engine here can do."""
    for name, why in _unserved(request):
        raise refused(f"{name} is not supported: {why}")


def _unserved(request: pb.GenerateRequest) -> Iterator[tuple[str, str]]:
    sampling, output = request.sampling_config, request.output_config
    yield from ((name, why) for name, why in _REQUEST.items() if request.HasField(name))  # type: ignore[arg-type]
    yield from ((f"sampling_config.{name}", why) for name, why in _SAMPLING.items() if sampling.HasField(name))  # type: ignore[arg-type]
    flags = {
        "embedding_bias": (request.embedding_bias, "a bias for each token of the vocabulary is not served"),
        "bad": (request.bad, "bad_token_ids are served"),
        "tokenized.query_token_ids": (request.tokenized.query_token_ids, "prompts are of tokens alone"),
        "disaggregated_params": (_is_disaggregated(request), "prefill and decode are not served apart"),
        "sampling_config.beam_width": (not 0 <= sampling.beam_width <= 1, _NO_BEAMS),
        "sampling_config.beam_width_array": (sampling.beam_width_array, _NO_BEAMS),
        "sampling_config.prompt_ignore_length": (
            _counts_the_prompt(request),
            "presence_penalty and frequency_penalty count new tokens alone",
        ),
        "output_config.return_context_logits": (output.return_context_logits, _NO_TENSORS),
        "output_config.return_generation_logits": (output.return_generation_logits, _NO_TENSORS),
        "output_config.return_encoder_output": (output.return_encoder_output, _NO_TENSORS),
        "output_config.return_perf_metrics": (output.return_perf_metrics, "the shard measures no single request"),
    }
    yield from ((name, why) for name, (is_asked_for, why) in flags.items() if is_asked_for)
    guide_type = request.guided_decoding.guide_type
    if request.HasField("guided_decoding") and guide_type in _GUIDES:
        yield "guided_decoding", _GUIDES[guide_type]


def _is_disaggregated(request: pb.GenerateRequest) -> bool:
    """A request for both phases, with nothing said of another server, is an ordinary one."""
    return request.HasField("disaggregated_params") and request.disaggregated_params != pb.DisaggregatedParams()


def _counts_the_prompt(request: pb.GenerateRequest) -> bool:
    sampling = request.sampling_config
    length = len(request.tokenized.input_token_ids)
    return sampling.HasField("prompt_ignore_length") and sampling.prompt_ignore_length < length
