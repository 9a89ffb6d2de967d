"""GatewayRequest: a GenerateRequest of TrtllmService, checked and converted to new sequences of the engine.

Unset fields have the defaults of TensorRT-LLM's own server (NVIDIA/TensorRT-LLM, tensorrt_llm/grpc/smg/request_manager.py):
temperature and top_p are 1.0, so it samples. Greedy is temperature 0, top_k 1 or top_p 0 (tensorrt_llm/sampling_params.py).
max_tokens beyond the model's positions is reduced to what is left (executor/base_worker.py): gateways send 2048 when their
client sent nothing.

TensorRT-LLM's own server silently ignores kv_cache_retention, lookahead_config, prompt_ignore_length, return_perf_metrics and
cache_salt_id. A client that sends one gets another result than it asked for. Here every field that cannot be honoured is
refused by name.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import grpc
from pydantic import BaseModel, Field, ValidationError

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_proto.values import MAX_LOGIT_BIAS, Grammar, GrammarKind, LogprobOptions, Sampling, Stopping
from text_generation_shard.engine import EngineInfo, NewSequence, Retention, sequence_problem

BANNED = -100.0
"""Logit bias of a banned token: the lowest allowed."""
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
"""Characters of a stop string."""
MAX_MESSAGE_LENGTH = 500
"""Characters of an error: a message may quote the request, and clients may refuse more than 8 KiB of metadata."""
ANY_JSON = '{"type": ["object", "array"]}'
"""Schema for GUIDE_TYPE_JSON: an object or an array, as in the JSON grammar of TensorRT-LLM's xgrammar."""

_NO_BEAMS = "beam search is not served"
_NO_TENSORS = "logits and hidden states are not sent"
_UNSERVED = {
    "prompt_tuning_config": "prompt tuning is not served",
    "multimodal_input": "prompts are of tokens alone",
    "lookahead_config": "speculation is set up when the engine is built",
}
"""Optional fields of GenerateRequest that are refused if present."""
_UNSERVED_SAMPLING = {
    "top_p_min": "top_p does not decay",
    "top_p_reset_ids": "top_p does not decay",
    "top_p_decay": "top_p does not decay",
    "beam_search_diversity_rate": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "no_repeat_ngram_size": "repetition_penalty, presence_penalty and frequency_penalty are served",
}
_BY_XGRAMMAR = (GrammarKind.EBNF, GrammarKind.STRUCTURAL_TAG)
_GUIDES = {
    pb.GuidedDecodingParams.GUIDE_TYPE_REGEX: GrammarKind.REGEX,
    pb.GuidedDecodingParams.GUIDE_TYPE_EBNF_GRAMMAR: GrammarKind.EBNF,
    pb.GuidedDecodingParams.GUIDE_TYPE_STRUCTURAL_TAG: GrammarKind.STRUCTURAL_TAG,
}
_UNSERVED_GUIDES = {
    pb.GuidedDecodingParams.GUIDE_TYPE_UNSPECIFIED: "guide_type is not set",
}


_Priority = Annotated[int, Field(ge=0, le=100)]
_Milliseconds = Annotated[int, Field(ge=1, le=1 << 40)]
_Token = Annotated[int, Field(ge=0, le=1 << 30)]


class _TokenRange(BaseModel, strict=True, extra="forbid"):
    token_start: _Token
    token_end: _Token | None = None
    priority: _Priority
    duration_ms: _Milliseconds | None = None


class _RetentionConfig(BaseModel, strict=True, extra="forbid"):
    token_range_retention_configs: Annotated[list[_TokenRange], Field(max_length=64)] = []
    decode_retention_priority: _Priority = 35
    decode_duration_ms: _Milliseconds | None = None


class CallFailed(Exception):
    """A call of the gateway ends with this status. The message is for its client."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message if len(message) <= MAX_MESSAGE_LENGTH else message[: MAX_MESSAGE_LENGTH - 1] + "…"


def refused(message: str) -> CallFailed:
    """Return the error for a request that cannot be served. `message` begins with the field's name."""
    return CallFailed(grpc.StatusCode.INVALID_ARGUMENT, message)


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """A validated request."""

    request_id: str
    streaming: bool
    sequences: tuple[NewSequence, ...]
    """Slots are not assigned yet."""
    stops: tuple[str, ...]
    keep_stop: bool
    """True if a matched stop token or stop string stays in the output."""
    top_n: int | None
    """Most probable tokens to report at each new position; None: no log-probabilities at all."""
    prompt_top_n: int | None
    """Most probable tokens to report at each prompt position; None: no prompt log-probabilities."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.sequences[0].prompt


def read_request(request: pb.GenerateRequest, info: EngineInfo) -> GatewayRequest:
    """Validate and convert `request`. Raises CallFailed, naming the field, if it cannot be served."""
    for name, why in _unserved(request):
        raise refused(f"{name} is not supported: {why}")
    prompt = _prompt(request, info)
    output = request.output_config
    top_n = _top_n("output_config.logprobs", output.logprobs if output.HasField("logprobs") else None, info)
    prompt_top_n = _top_n(
        "output_config.prompt_logprobs", output.prompt_logprobs if output.HasField("prompt_logprobs") else None, info
    )
    sequence = NewSequence(
        slot=0,
        prompt=prompt,
        stopping=_stopping(request, info, len(prompt)),
        sampling=_sampling(request, info),
        logprobs=LogprobOptions(top_n or 0, prompt_top_n is not None, prompt_top_n or 0, top_n is not None),
        grammar=_grammar(request, info),
        cache_salt=str(request.cache_salt_id) if request.HasField("cache_salt_id") else "",
        adapter=_adapter(request, info),
        retention=_retention(request, info),
    )
    _check_supported(request, sequence, info)
    if problem := sequence_problem(sequence, info):
        raise refused(problem)
    return GatewayRequest(
        request_id=request.request_id,
        streaming=request.streaming,
        sequences=_copies(sequence, _count(request, info)),
        stops=_stops(request),
        keep_stop=request.include_stop_token_in_output,
        top_n=top_n,
        prompt_top_n=prompt_top_n,
    )


def _unserved(request: pb.GenerateRequest) -> Iterator[tuple[str, str]]:
    """Yield (field, why) for each requested feature that no engine here has."""
    sampling, output = request.sampling_config, request.output_config
    yield from ((name, why) for name, why in _UNSERVED.items() if request.HasField(name))  # type: ignore[arg-type]
    yield from (
        (f"sampling_config.{name}", why)
        for name, why in _UNSERVED_SAMPLING.items()
        if sampling.HasField(name)  # type: ignore[arg-type]
    )
    # A request for prefill and decode together, with no other server named, is an ordinary one.
    disaggregated = (
        request.HasField("disaggregated_params") and request.disaggregated_params != pb.DisaggregatedParams()
    )
    counts_prompt = sampling.HasField("prompt_ignore_length") and sampling.prompt_ignore_length < len(
        request.tokenized.input_token_ids
    )
    flags = {
        "embedding_bias": (request.embedding_bias, "a bias for each token of the vocabulary is not served"),
        "bad": (request.bad, "bad_token_ids are served"),
        "tokenized.query_token_ids": (request.tokenized.query_token_ids, "prompts are of tokens alone"),
        "disaggregated_params": (disaggregated, "prefill and decode are not served apart"),
        "sampling_config.beam_width": (not 0 <= sampling.beam_width <= 1, _NO_BEAMS),
        "sampling_config.beam_width_array": (sampling.beam_width_array, _NO_BEAMS),
        "sampling_config.prompt_ignore_length": (
            counts_prompt,
            "presence_penalty and frequency_penalty count new tokens alone",
        ),
        "output_config.return_context_logits": (output.return_context_logits, _NO_TENSORS),
        "output_config.return_generation_logits": (output.return_generation_logits, _NO_TENSORS),
        "output_config.return_encoder_output": (output.return_encoder_output, _NO_TENSORS),
        "output_config.return_perf_metrics": (output.return_perf_metrics, "the shard measures no single request"),
    }
    yield from ((name, why) for name, (is_requested, why) in flags.items() if is_requested)
    guide_type = request.guided_decoding.guide_type
    if request.HasField("guided_decoding") and guide_type in _UNSERVED_GUIDES:
        yield "guided_decoding", _UNSERVED_GUIDES[guide_type]


def _copies(sequence: NewSequence, count: int) -> tuple[NewSequence, ...]:
    """Return `count` copies with seeds of their own. Only the first has its prompt scored."""
    unscored = replace(sequence, logprobs=sequence.logprobs.without_prompt())
    return (
        sequence,
        *(replace(unscored, sampling=sequence.sampling.for_answer(index)) for index in range(1, count)),
    )


def _count(request: pb.GenerateRequest, info: EngineInfo) -> int:
    count = request.sampling_config.num_return_sequences or 1
    if count > info.max_slots:
        raise refused(f"sampling_config.num_return_sequences is at most {info.max_slots}")
    return count


def _prompt(request: pb.GenerateRequest, info: EngineInfo) -> tuple[int, ...]:
    if not request.HasField("tokenized"):
        raise refused("tokenized is missing: the prompt comes as tokens")
    prompt = tuple(request.tokenized.input_token_ids)
    if not prompt:
        raise refused("tokenized.input_token_ids is empty")
    if len(prompt) >= info.max_sequence_length:
        raise refused(
            f"tokenized.input_token_ids has {len(prompt)} tokens, which leaves no room for a new one: "
            f"the model takes {info.max_sequence_length} in all"
        )
    return prompt


def _stopping(request: pb.GenerateRequest, info: EngineInfo, prompt_length: int) -> Stopping:
    if request.max_tokens < 1:
        raise refused("max_tokens must be at least 1")
    max_tokens = min(request.max_tokens, info.max_sequence_length - prompt_length)
    min_tokens = request.sampling_config.min_tokens
    if min_tokens > max_tokens:
        raise refused(f"sampling_config.min_tokens is at most max_tokens, here {max_tokens}. Given: {min_tokens}")
    return Stopping(
        max_new_tokens=max_tokens,
        eos_token_ids=frozenset() if request.ignore_eos else frozenset(info.eos_token_ids),
        stop_token_ids=frozenset(request.stop_token_ids),
        min_new_tokens=min_tokens,
    )


def _adapter(request: pb.GenerateRequest, info: EngineInfo) -> str:
    """Return the name of the adapter whose place in --lora-adapters is the task's id, from 1; "" for 0."""
    config = request.lora_config
    if config.HasField("weights") or config.HasField("config_json"):
        raise refused("lora_config.weights, lora_config.config_json are not supported: adapters are given at the start")
    if not 0 <= config.task_id <= len(info.adapters):
        raise refused(
            f"lora_config.task_id is 0 to {len(info.adapters)}, the number of adapters. Given: {config.task_id}"
        )
    return info.adapters[config.task_id - 1] if config.task_id else ""


def _retention(request: pb.GenerateRequest, info: EngineInfo) -> Retention | None:
    """Return the retention that config_json describes by the names of TensorRT-LLM's KvCacheRetentionConfig."""
    if not request.HasField("kv_cache_retention"):
        return None
    if not info.retains:
        raise refused("kv_cache_retention is not supported: what is cached is the engine's choice")
    if request.kv_cache_retention.policy:
        raise refused("kv_cache_retention.policy is not supported: config_json is served")
    try:
        config = _RetentionConfig.model_validate_json(request.kv_cache_retention.config_json)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise refused(f"kv_cache_retention.config_json: {where}: {first['msg']}") from None
    ranges = config.token_range_retention_configs
    return Retention(
        tuple((each.token_start, each.token_end, each.priority, each.duration_ms) for each in ranges),
        config.decode_retention_priority,
        config.decode_duration_ms,
    )


def _stops(request: pb.GenerateRequest) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys(request.stop))
    if len(stops) > MAX_STOP_STRINGS:
        raise refused(f"stop holds at most {MAX_STOP_STRINGS} strings")
    if not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise refused(f"stop: a stop string has 1 to {MAX_STOP_LENGTH} characters")
    return stops


def _top_n(name: str, value: int | None, info: EngineInfo) -> int | None:
    if value is not None and not 0 <= value <= info.max_top_n_tokens:
        raise refused(f"{name} is 0 to {info.max_top_n_tokens}")
    return value


def _sampling(request: pb.GenerateRequest, info: EngineInfo) -> Sampling:
    config = request.sampling_config
    temperature = config.temperature if config.HasField("temperature") else 1.0
    top_p = config.top_p if config.HasField("top_p") else 1.0
    penalty = config.repetition_penalty if config.HasField("repetition_penalty") else 1.0
    _check_range("temperature", temperature, 0, math.inf)
    _check_range("top_p", top_p, 0, 1)
    _check_range("min_p", config.min_p, 0, 1)
    _check_range("repetition_penalty", penalty, 0, math.inf)
    _check_range("presence_penalty", config.presence_penalty, -2, 2)
    _check_range("frequency_penalty", config.frequency_penalty, -2, 2)
    if penalty == 0:
        raise refused("sampling_config.repetition_penalty is more than 0")
    if config.top_k < 0:
        raise refused("sampling_config.top_k is at least 0")
    banned = _banned(request, info)
    greedy = Sampling(
        repetition_penalty=penalty,
        output_presence_penalty=config.presence_penalty,
        output_frequency_penalty=config.frequency_penalty,
        logit_bias_ids=banned,
        logit_bias_values=(BANNED,) * len(banned),
    )
    if temperature == 0 or top_p == 0 or config.top_k == 1:
        return greedy
    # An engine that does not support seeds gets none.
    has_seeds = "seed" not in dict(info.unsupported)
    seed = config.seed if config.HasField("seed") else secrets.randbits(64) if has_seeds else 0
    return replace(
        greedy, greedy=False, temperature=temperature, top_k=config.top_k, top_p=top_p, min_p=config.min_p, seed=seed
    )


def _check_range(name: str, value: float, least: float, most: float) -> None:
    # NaN fails the comparison.
    if not least <= value <= most or value == math.inf:
        bounds = f"in [{least}, {most}]" if most < math.inf else f"finite and at least {least}"
        raise refused(f"sampling_config.{name} must be {bounds}")


def _banned(request: pb.GenerateRequest, info: EngineInfo) -> tuple[int, ...]:
    banned = tuple(dict.fromkeys(request.bad_token_ids))
    if len(banned) > MAX_LOGIT_BIAS:
        raise refused(f"bad_token_ids holds at most {MAX_LOGIT_BIAS} tokens")
    if banned and max(banned) >= info.vocab_size:
        raise refused(f"bad_token_ids: a token is outside the vocabulary of {info.vocab_size}")
    return banned


def _grammar(request: pb.GenerateRequest, info: EngineInfo) -> Grammar | None:
    if not request.HasField("guided_decoding"):
        return None
    guide = request.guided_decoding
    if guide.guide_type == pb.GuidedDecodingParams.GUIDE_TYPE_JSON:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, ANY_JSON)
    elif guide.guide_type == pb.GuidedDecodingParams.GUIDE_TYPE_JSON_SCHEMA:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, guide.guide)
    elif guide.guide_type in _GUIDES:
        grammar = Grammar(_GUIDES[guide.guide_type], guide.guide)
    else:
        raise refused("guided_decoding.guide_type is of no known kind")
    if grammar.kind not in info.grammar_kinds:
        needed = ": start it with guided_decoding_backend: xgrammar" if grammar.kind in _BY_XGRAMMAR else ""
        raise refused(f"guided_decoding is not supported: this engine follows no {grammar.kind.value}{needed}")
    return grammar


def _check_supported(request: pb.GenerateRequest, sequence: NewSequence, info: EngineInfo) -> None:
    """Raise CallFailed, with the request's name of the field, for a parameter that this engine does not support.

    A field at its neutral value is not a request for it; a seed is honoured trivially where nothing is drawn.
    """
    sampling, stopping, output = sequence.sampling, sequence.stopping, request.output_config
    needed = {
        "temperature": ("sampling_config.temperature", sampling.temperature != 1),
        "top_k": ("sampling_config.top_k", sampling.top_k > 0),
        "top_p": ("sampling_config.top_p", sampling.top_p < 1),
        "min_p": ("sampling_config.min_p", sampling.min_p > 0),
        "repetition_penalty": ("sampling_config.repetition_penalty", sampling.repetition_penalty != 1),
        "output_frequency_penalty": ("sampling_config.frequency_penalty", sampling.output_frequency_penalty != 0),
        "output_presence_penalty": ("sampling_config.presence_penalty", sampling.output_presence_penalty != 0),
        "seed": ("sampling_config.seed", request.sampling_config.HasField("seed") and not sampling.greedy),
        "logit_bias_ids": ("bad_token_ids", bool(sampling.logit_bias_ids)),
        "stop_token_ids": ("stop_token_ids", bool(stopping.stop_token_ids)),
        "min_new_tokens": ("sampling_config.min_tokens", stopping.min_new_tokens > 0),
        # An engine that cannot report the most probable tokens has no log-probability of the chosen one either.
        "top_n": ("output_config.logprobs", output.HasField("logprobs")),
        "prompt": ("output_config.prompt_logprobs", sequence.logprobs.prompt),
        "prompt_top_n": ("output_config.prompt_logprobs", sequence.logprobs.prompt_top_n > 0),
        "cache_salt": ("cache_salt_id", bool(sequence.cache_salt)),
    }
    for field, reason in info.unsupported:
        name, is_needed = needed.get(field, ("", False))
        if is_needed:
            raise refused(f"{name} is not supported by this engine: {reason}")
