"""Map the parameters of a sequence to keywords of TensorRT-LLM's SamplingParams and generate_async.

Most have the same names. Others, and their reasons:

greedy                       top_k=1, which is greedy in every version
temperature, top_p           always set: unset, the request would be greedy, for the C++ sampler also where both top_k and
                             top_p are unset (setupTopKRuntimeArgs, cpp/tensorrt_llm/kernels/samplingTopKKernels.cu)
frequency_penalty (TGI)      frequency_penalty over prompt and output, as in TGI's own TensorRT-LLM backend
output_frequency_penalty     frequency_penalty, with prompt_ignore_length to leave the prompt out; output_presence_penalty too
stop_token_ids               with include_stop_str_in_output, so that reported tokens are never removed
max_new_tokens               max_tokens, always set (default 32)
tokens, top_n                logprobs, at least 1: 0 means none in 1.2 and the chosen token only in 1.3. Left out unless the
                             request needs them: they cost time, and speculative decoding excludes them
priority                     it orders the queue with waiting_queue_policy: priority
trace                        trace_headers; the engine makes spans if --trtllm-options have otlp_traces_endpoint
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from text_generation_common.grammar_options import JSON_OPTIONS
from text_generation_proto.values import Grammar, GrammarKind, Sampling
from text_generation_shard.engine import NewSequence
from text_generation_shard.engines.tensorrt_llm.library import Library
from text_generation_shard.engines.tensorrt_llm.lora import LoraRequests
from text_generation_shard.engines.tensorrt_llm.speculation import Speculation

MAX_LOGPROBS = 20
"""Limit of ≥ 1.3."""
MAX_SCORED_BYTES = 4 << 30
"""Limit of the logits of a scored prompt, which TensorRT-LLM holds in memory: prompt × vocabulary × 4 bytes."""
CXX_SAMPLER = "TRTLLMSampler"
_PENALTIES = ("repetition_penalty", "frequency_penalty", "output_frequency_penalty", "output_presence_penalty")
_BIASES = ("logit_bias_ids", "allowed_token_ids")
_DRAWING = ("typical_p", "watermark", "min_p", "allowed_token_ids", "bad_words", *_PENALTIES)
"""Fields of Sampling that are refused if they are unsupported and not neutral. The router refuses a seed."""
_FORBIDDEN = -1e9
_NEUTRAL = Sampling()
_GUIDES = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
    GrammarKind.EBNF: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}
"""Fields of GuidedDecodingParams."""
_PRIORITIES = (0.5, 1.0, 0.75, 0.5, 0.25)
"""TensorRT-LLM's priority of each class on the wire; 0.5 is its default."""


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """The parameters that an engine supports; they depend on version, sampler, backend and build."""

    penalties: bool
    """Penalties, min_p, min_tokens and seeds."""
    prompt_logprobs: bool
    logprobs: bool = True
    """Log-probabilities of new tokens; a compiled engine has them only if it was built with gather_generation_logits."""
    speculation: Speculation | None = None
    aborts_scored: bool = True
    """Requests with log-probabilities may be aborted; compiled engines crash (issue #10810)."""
    longest_prompt: int | None = None
    """Longest prompt, if the engine does not split prompts; None: no other limit than that of a sequence."""
    grammar_kinds: tuple[GrammarKind, ...] = ()

    @property
    def unsupported(self) -> tuple[tuple[str, str], ...]:
        """Return (field, reason) of each unsupported parameter."""
        fields = [
            ("typical_p", "TensorRT-LLM has no typical sampling"),
            ("watermark", "TensorRT-LLM has no watermark"),
            ("bad_words", "TensorRT-LLM bans texts that it tokenizes itself; `logit_bias` can forbid single tokens"),
        ]
        if self.speculation is not None and self.speculation.in_model:
            why = f"speculative decoding ({self.speculation.kind}) ignores it"
            fields += [(name, why) for name in (*_PENALTIES, "min_p", "seed", "min_new_tokens", *_BIASES)]
        elif not self.penalties:
            why = "the default sampler of this version of TensorRT-LLM ignores it"
            if self.speculation is None:
                why += f"; start the server with --trtllm-options 'sampler_type: {CXX_SAMPLER}'"
            fields += [(name, why) for name in (*_PENALTIES, "min_p", "seed")]
            # This sampler counts prompt tokens too (PRs #12166, #12358), so min_tokens has no effect with most prompts.
            fields.append(("min_new_tokens", why))
        if self.speculation is not None:
            why = f"TensorRT-LLM computes no log-probabilities with speculative decoding ({self.speculation.kind})"
            fields += [(name, why) for name in ("tokens", "top_n", "prompt", "prompt_top_n")]
        elif not self.logprobs:
            why = "this engine was built without gather_generation_logits"
            fields += [("tokens", why), ("top_n", why)]
        if self.speculation is None and not self.prompt_logprobs:
            why = "this version of TensorRT-LLM does not say how probable the prompt's own tokens are"
            fields += [("prompt", why), ("prompt_top_n", why)]
        return tuple(fields)


@dataclass(slots=True, eq=False)
class Parameters:
    """Builds the arguments of `generate_async`. Each call makes a new SamplingParams, because the engine modifies it."""

    library: Library
    capabilities: EngineCapabilities
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    adapters: LoraRequests
    _salts: Iterator[int] = field(default_factory=count)

    def problem(self, sequence: NewSequence) -> str | None:
        """Return an error that names the first unsupported parameter of `sequence`; None if there is none."""
        sampling = sequence.sampling
        reasons = dict(self.capabilities.unsupported)
        used = {
            **{name: getattr(sampling, name) != getattr(_NEUTRAL, name) for name in _DRAWING},
            "min_new_tokens": sequence.stopping.min_new_tokens > 0,
            "top_n": sequence.logprobs.top_n > 0,
            "prompt": sequence.logprobs.prompt,
            "prompt_top_n": sequence.logprobs.prompt_top_n > 0,
            "logit_bias_ids": any(sampling.logit_bias_values),
        }
        for name, is_used in used.items():
            if is_used and name in reasons:
                return f"{name} is not supported: {reasons[name]}"
        length = len(sequence.prompt)
        longest = self.capabilities.longest_prompt
        if longest is not None and length > longest:
            return (
                f"the prompt has {length} tokens, and this engine computes at most {longest} (max_num_tokens) at once"
            )
        if sequence.logprobs.prompt and 4 * length * self.vocab_size > MAX_SCORED_BYTES:
            most = MAX_SCORED_BYTES // (4 * self.vocab_size)
            return f"the prompt has {length} tokens, and log-probabilities are computed for at most {most}"
        if sampling.frequency_penalty and (sampling.output_frequency_penalty or sampling.output_presence_penalty):
            return "frequency_penalty cannot be combined with output_frequency_penalty or output_presence_penalty"
        if sequence.grammar is not None:
            if not sequence.grammar.text:
                return "the grammar is empty"  # TensorRT-LLM would ignore it
            if sequence.grammar.kind not in self.capabilities.grammar_kinds:
                return f"grammars of kind {sequence.grammar.kind.value} are not supported"
            if sequence.generated_tokens:
                return "a sequence with a grammar cannot continue: guided decoding begins with the first new token"
        return None

    def may_abort(self, sequence: NewSequence) -> bool:
        """Return False if the engine would crash when this request is aborted: it has to run to its end."""
        return self.capabilities.aborts_scored or "logprobs" not in self._logprobs(sequence)

    def arguments(self, sequence: NewSequence) -> dict[str, Any]:
        """Return the keywords of `generate_async`. Raises ValueError or TypeError if SamplingParams refuses a value."""
        arguments: dict[str, Any] = {
            "inputs": {"prompt_token_ids": list(sequence.prompt)},
            "sampling_params": self.library.sampling_params(**self.sampling(sequence)),
            "streaming": True,
        }
        if sequence.logprobs.prompt:
            # Only computed tokens have log-probabilities: with a salt of its own no part of the prompt is cached.
            arguments["cache_salt"] = f"scored-{next(self._salts)}"
        elif sequence.cache_salt:
            arguments["cache_salt"] = sequence.cache_salt
        if sequence.priority and self.library.has_priorities:
            arguments["priority"] = _PRIORITIES[min(sequence.priority, len(_PRIORITIES) - 1)]
        if sequence.trace is not None:
            headers = {"traceparent": sequence.trace.traceparent, "tracestate": sequence.trace.tracestate}
            arguments["trace_headers"] = {name: value for name, value in headers.items() if value}
        if sequence.adapter:
            arguments["lora_request"] = self.adapters[sequence.adapter]
        if sequence.rank:
            # Relaxed, it could go to a rank that the router takes for full. Unset, 1.2 cannot sort its queue (PR #14276).
            bound = {"attention_dp_rank": sequence.rank - 1, "attention_dp_relax": False}
            arguments["scheduling_params"] = self.library.scheduling_params(**bound)
        return arguments

    def sampling(self, sequence: NewSequence) -> dict[str, Any]:
        """Return the keywords of SamplingParams."""
        keywords: dict[str, Any] = {
            "max_tokens": sequence.stopping.max_new_tokens,
            "detokenize": False,
            "include_stop_str_in_output": True,
            **self._stopping(sequence),
            **self._drawing(sequence.sampling),
            **(self._penalties(sequence) if self.capabilities.penalties else {}),
            **self._logprobs(sequence),
        }
        drawn = sequence.sampling
        if drawn.logit_bias_ids or drawn.allowed_token_ids:
            bias = np.full(self.vocab_size, _FORBIDDEN if drawn.allowed_token_ids else 0, dtype=np.float32)
            bias[list(drawn.allowed_token_ids)] = 0
            np.add.at(bias, list(drawn.logit_bias_ids), drawn.logit_bias_values)
            keywords["embedding_bias"] = bias
        if sequence.grammar is not None:
            keywords["guided_decoding"] = self.library.guided_decoding_params(**self._guide(sequence.grammar))
        return keywords

    def _guide(self, grammar: Grammar) -> dict[str, str]:
        key = _GUIDES[grammar.kind]
        text = grammar.text
        if grammar.kind is GrammarKind.JSON_SCHEMA and GrammarKind.LARK in self.capabilities.grammar_kinds:
            # Only llguidance has Lark, and options for whitespace and separators.
            schema = json.loads(text)
            if isinstance(schema, dict):  # `true` and `false` are schemas too
                text = json.dumps({**schema, "x-guidance": JSON_OPTIONS})
        return {key: text}

    def _logprobs(self, sequence: NewSequence) -> dict[str, int]:
        wanted, keywords = sequence.logprobs, dict[str, int]()
        if self.capabilities.logprobs and (wanted.tokens or wanted.top_n):
            keywords["logprobs"] = max(1, wanted.top_n)
        if wanted.prompt:
            keywords["prompt_logprobs"] = max(1, wanted.prompt_top_n)
        return keywords

    def _stopping(self, sequence: NewSequence) -> dict[str, Any]:
        stopping = sequence.stopping
        keywords: dict[str, Any] = {}
        stops = set(stopping.stop_token_ids)
        if stopping.eos_token_ids:
            # Prefer the model's first EOS token: min_tokens, for one, holds off end_id only.
            end = next((i for i in self.eos_token_ids if i in stopping.eos_token_ids), min(stopping.eos_token_ids))
            keywords["end_id"] = end
            stops |= stopping.eos_token_ids - {end}
        else:
            keywords["end_id"] = self.eos_token_ids[0] if self.eos_token_ids else -1  # None would require a tokenizer
            keywords["ignore_eos"] = True
        keywords["pad_id"] = max(0, keywords["end_id"])
        if stops:
            keywords["stop_token_ids"] = sorted(stops)
        if stopping.min_new_tokens:
            keywords["min_tokens"] = stopping.min_new_tokens
        return keywords

    def _drawing(self, sampling: Sampling) -> dict[str, Any]:
        if sampling.greedy:
            return {"top_k": 1}
        keywords: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if 0 < sampling.top_k < self.vocab_size:  # larger values mean the whole vocabulary
            keywords["top_k"] = sampling.top_k
        if self.capabilities.penalties:
            keywords["seed"] = sampling.seed
            if sampling.min_p:
                keywords["min_p"] = sampling.min_p
        return keywords

    def _penalties(self, sequence: NewSequence) -> dict[str, Any]:
        sampling = sequence.sampling
        keywords: dict[str, Any] = {
            name: value
            for name in ("repetition_penalty", "frequency_penalty")
            if (value := getattr(sampling, name)) != getattr(_NEUTRAL, name)
        }
        if sampling.output_frequency_penalty or sampling.output_presence_penalty:
            keywords["frequency_penalty"] = sampling.output_frequency_penalty
            keywords["presence_penalty"] = sampling.output_presence_penalty
            # Tokens generated before a move are part of the prompt here, but count as output.
            keywords["prompt_ignore_length"] = len(sequence.prompt) - sequence.generated_tokens
        return keywords
