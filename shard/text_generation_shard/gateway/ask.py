"""Ask: what a Generate call asks for, in the engine's words. Everything wrong with a request is found here.

Where the message says nothing: what TensorRT-LLM's own server takes (NVIDIA/TensorRT-LLM,
tensorrt_llm/grpc/smg/request_manager.py): temperature and top_p 1.0, so that it samples. Greedy is temperature 0, top_k 1 or
top_p 0 (tensorrt_llm/sampling_params.py). More new tokens than the model has positions for are cut down to what is left, as
there (executor/base_worker.py): gateways send 2048 when their client said nothing.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_shard.checks import MAX_LOGIT_BIAS, admission_problem
from text_generation_shard.engine import Admission, EngineInfo, Grammar, GrammarKind, Sampling, Stopping
from text_generation_shard.gateway.errors import refused
from text_generation_shard.gateway.unserved import check_served

SEEDS = 1 << 64
BANNED = -100.0
"""Logit bias of a token that is not to come: the least there is."""
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
"""Characters of a stop string."""
ANY_JSON = '{"type": ["object", "array"]}'
"""What the grammar for JSON of TensorRT-LLM's xgrammar begins with: an object or an array."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that can be served, as far as can be told without the engine."""

    request_id: str
    streaming: bool
    admissions: tuple[Admission, ...]
    """One a sequence. Their slots mean nothing yet."""
    stops: tuple[str, ...]
    keep_stop: bool
    """Whether a matched stop token or stop string stays in the output."""
    top_n: int | None
    """Most probable tokens to tell of at each position, besides the chosen one; None: no log-probabilities at all."""
    prompt_top_n: int | None
    """The same of the prompt's positions."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.admissions[0].prompt


def read_ask(request: pb.GenerateRequest, info: EngineInfo) -> Ask:
    """What `request` asks of the engine. Raises CallFailed, naming the field, if it cannot be served."""
    check_served(request)
    prompt = _prompt(request, info)
    output = request.output_config
    top_n = _top_n("output_config.logprobs", output.logprobs if output.HasField("logprobs") else None, info)
    prompt_top_n = _top_n(
        "output_config.prompt_logprobs", output.prompt_logprobs if output.HasField("prompt_logprobs") else None, info
    )
    admission = Admission(
        slot=0,
        prompt=prompt,
        stopping=_stopping(request, info, len(prompt)),
        sampling=_sampling(request, info),
        top_n=top_n or 0,
        prompt_logprobs=prompt_top_n is not None,
        prompt_top_n=prompt_top_n or 0,
        grammar=_grammar(request, info),
        cache_salt=str(request.cache_salt_id) if request.HasField("cache_salt_id") else "",
    )
    _check_supported(request, admission, info)
    if problem := admission_problem(admission, info):
        raise refused(problem)
    return Ask(
        request_id=request.request_id,
        streaming=request.streaming,
        admissions=_sequences(admission, _count(request, info)),
        stops=_stops(request),
        keep_stop=request.include_stop_token_in_output,
        top_n=top_n,
        prompt_top_n=prompt_top_n,
    )


def _sequences(admission: Admission, count: int) -> tuple[Admission, ...]:
    """`count` times the same, with seeds of their own. The prompt is scored once."""
    others = replace(admission, prompt_logprobs=False, prompt_top_n=0)
    seed = admission.sampling.seed
    return (
        admission,
        *(
            replace(others, sampling=replace(admission.sampling, seed=(seed + index) % SEEDS))
            for index in range(1, count)
        ),
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


def _stops(request: pb.GenerateRequest) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys(request.stop))
    if len(stops) > MAX_STOP_STRINGS:
        raise refused(f"stop holds at most {MAX_STOP_STRINGS} strings")
    if not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise refused(f"stop: a stop string has 1 to {MAX_STOP_LENGTH} characters")
    return stops


def _top_n(name: str, asked: int | None, info: EngineInfo) -> int | None:
    if asked is not None and not 0 <= asked <= info.max_top_n_tokens:
        raise refused(f"{name} is 0 to {info.max_top_n_tokens}")
    return asked


def _sampling(request: pb.GenerateRequest, info: EngineInfo) -> Sampling:
    asked = request.sampling_config
    temperature = asked.temperature if asked.HasField("temperature") else 1.0
    top_p = asked.top_p if asked.HasField("top_p") else 1.0
    penalty = asked.repetition_penalty if asked.HasField("repetition_penalty") else 1.0
    _check_range("temperature", temperature, 0, math.inf)
    _check_range("top_p", top_p, 0, 1)
    _check_range("min_p", asked.min_p, 0, 1)
    _check_range("repetition_penalty", penalty, 0, math.inf)
    _check_range("presence_penalty", asked.presence_penalty, -2, 2)
    _check_range("frequency_penalty", asked.frequency_penalty, -2, 2)
    if penalty == 0:
        raise refused("sampling_config.repetition_penalty is more than 0")
    if asked.top_k < 0:
        raise refused("sampling_config.top_k is at least 0")
    banned = _banned(request, info)
    penalised = Sampling(
        repetition_penalty=penalty,
        output_presence_penalty=asked.presence_penalty,
        output_frequency_penalty=asked.frequency_penalty,
        logit_bias_ids=banned,
        logit_bias_values=(BANNED,) * len(banned),
    )
    if temperature == 0 or top_p == 0 or asked.top_k == 1:
        return penalised
    # An engine that cannot be told a seed is told none.
    tells_seed = "seed" not in dict(info.unsupported)
    seed = asked.seed if asked.HasField("seed") else secrets.randbits(64) if tells_seed else 0
    return replace(
        penalised, greedy=False, temperature=temperature, top_k=asked.top_k, top_p=top_p, min_p=asked.min_p, seed=seed
    )


def _check_range(name: str, value: float, least: float, most: float) -> None:
    # Written so that NaN fails.
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
    elif guide.guide_type == pb.GuidedDecodingParams.GUIDE_TYPE_REGEX:
        grammar = Grammar(GrammarKind.REGEX, guide.guide)
    else:
        raise refused("guided_decoding.guide_type is of no known kind")
    if grammar.kind not in info.grammar_kinds:
        raise refused(f"guided_decoding is not supported: this engine follows no {grammar.kind.value}")
    return grammar


def _check_supported(request: pb.GenerateRequest, admission: Admission, info: EngineInfo) -> None:
    """What this engine cannot honour is refused by the request's name for it. A field at its neutral value is not asked
    for; where nothing is drawn, every seed is honoured."""
    asked = _asked(request, admission)
    for name, reason in info.unsupported:
        if field := asked.get(name):
            raise refused(f"{field} is not supported by this engine: {reason}")


def _asked(request: pb.GenerateRequest, admission: Admission) -> Mapping[str, str]:
    """The fields of Sampling, Stopping and LogprobOptions that `admission` needs → what the request calls them."""
    sampling, stopping, output = admission.sampling, admission.stopping, request.output_config
    needed = {
        ("temperature", "sampling_config.temperature"): sampling.temperature != 1,
        ("top_k", "sampling_config.top_k"): sampling.top_k > 0,
        ("top_p", "sampling_config.top_p"): sampling.top_p < 1,
        ("min_p", "sampling_config.min_p"): sampling.min_p > 0,
        ("repetition_penalty", "sampling_config.repetition_penalty"): sampling.repetition_penalty != 1,
        ("output_frequency_penalty", "sampling_config.frequency_penalty"): sampling.output_frequency_penalty != 0,
        ("output_presence_penalty", "sampling_config.presence_penalty"): sampling.output_presence_penalty != 0,
        ("seed", "sampling_config.seed"): request.sampling_config.HasField("seed") and not sampling.greedy,
        ("logit_bias_ids", "bad_token_ids"): bool(sampling.logit_bias_ids),
        ("stop_token_ids", "stop_token_ids"): bool(stopping.stop_token_ids),
        ("min_new_tokens", "sampling_config.min_tokens"): stopping.min_new_tokens > 0,
        # An engine without the most probable tokens has no log-probability of the chosen one, either.
        ("top_n", "output_config.logprobs"): output.HasField("logprobs"),
        ("prompt", "output_config.prompt_logprobs"): admission.prompt_logprobs,
        ("prompt_top_n", "output_config.prompt_logprobs"): admission.prompt_top_n > 0,
        ("cache_salt", "cache_salt_id"): bool(admission.cache_salt),
    }
    return {field: name for (field, name), is_needed in needed.items() if is_needed}
