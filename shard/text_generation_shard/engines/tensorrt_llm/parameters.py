"""An admission in TensorRT-LLM's words: keywords of SamplingParams and of generate_async; and what has no words there.

    ours                         theirs
    greedy                       top_k=1, which every version takes for greedy, whatever else is unset
    temperature, top_k, top_p    the same; temperature is always said: with nothing said it would be greedy, and so is top_p:
                                 the C++ sampler takes neither top_k nor top_p for greedy (setupTopKRuntimeArgs,
                                 cpp/tensorrt_llm/kernels/samplingTopKKernels.cu)
    min_p, seed                  the same, where the sampler honours them
    repetition_penalty           the same
    frequency_penalty (TGI's)    frequency_penalty over prompt and output, as in TGI's own TensorRT-LLM backend
    output_frequency_penalty,    frequency_penalty, presence_penalty, with prompt_ignore_length: the prompt does not count
    output_presence_penalty
    logit_bias                   embedding_bias, a value for every token of the vocabulary
    eos_token_ids                end_id, and stop_token_ids for the others; none: ignore_eos
    stop_token_ids               stop_token_ids, with include_stop_str_in_output: nothing told is taken back
    min_new_tokens               min_tokens
    max_new_tokens               max_tokens, which is 32 where it is not said
    top_n                        logprobs, at least 1: 0 is none in 1.2, and the chosen token's in 1.3
    prompt logprobs              prompt_logprobs
    grammar                      guided_decoding
    cache_salt                   cache_salt

What the installed version would drop in silence is in `unsupported`, with the reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from text_generation_proto.grammar_options import JSON_OPTIONS
from text_generation_proto.values import Grammar, GrammarKind, Sampling
from text_generation_shard.engine import NewSequence
from text_generation_shard.engines.tensorrt_llm.library import Library

MAX_LOGPROBS = 20
"""More are refused by ≥ 1.3."""
CXX_SAMPLER = "TRTLLMSampler"
_PENALTIES = ("repetition_penalty", "frequency_penalty", "output_frequency_penalty", "output_presence_penalty")
_NEUTRAL = Sampling()


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the engine that was built can do."""

    honours_sampling: bool
    """Penalties, min_p and seeds."""
    scores_prompts: bool
    """Prompt log-probabilities hold the prompt's own tokens."""
    scores_tokens: bool = True
    """Tokens have log-probabilities: a compiled engine has them only if it was built to gather logits."""
    grammar_kinds: tuple[GrammarKind, ...] = ()
    reads_guidance: bool = False
    """Whether JSON schemas may say, in llguidance's own words, how their text is laid out."""

    @property
    def unsupported(self) -> tuple[tuple[str, str], ...]:
        """(field, why) of all that is refused."""
        refused = [
            ("typical_p", "TensorRT-LLM has no typical sampling"),
            ("watermark", "TensorRT-LLM has no watermark"),
        ]
        if not self.honours_sampling:
            why = (
                "the default sampler of this version of TensorRT-LLM ignores it; "
                f"start the server with --trtllm-options 'sampler_type: {CXX_SAMPLER}'"
            )
            refused += [(name, why) for name in (*_PENALTIES, "min_p", "seed")]
            # It counts the prompt's tokens too (PRs #12166, #12358): with most prompts it has no effect.
            refused.append(("min_new_tokens", why))
        if not self.scores_tokens:
            why = "this engine was built without gather_generation_logits"
            refused.append(("top_n", why))
        if not self.scores_prompts:
            why = "this version of TensorRT-LLM does not say how probable the prompt's own tokens are"
            refused += [("prompt", why), ("prompt_top_n", why)]
        return tuple(refused)


class Parameters:
    """Makes the arguments of `generate_async`. Immutable but for a counter; a SamplingParams is made anew each time,
    because the engine writes into it."""

    def __init__(self, library: Library, abilities: Abilities, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._library = library
        self._abilities = abilities
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._scored = count()

    def problem(self, admission: NewSequence) -> str | None:
        """What `admission` asks that cannot be had, by name; None if nothing is."""
        sampling, defaults = admission.sampling, _NEUTRAL
        reasons = dict(self._abilities.unsupported)
        asked = {
            "typical_p": sampling.typical_p < 1,
            "watermark": sampling.watermark,
            "min_p": sampling.min_p > 0,
            "min_new_tokens": admission.stopping.min_new_tokens > 0,
            "top_n": admission.logprobs.top_n > 0,
            "prompt": admission.logprobs.prompt,
            "prompt_top_n": admission.logprobs.prompt_top_n > 0,
            **{name: getattr(sampling, name) != getattr(defaults, name) for name in _PENALTIES},
        }
        for name, is_asked in asked.items():
            if is_asked and name in reasons:
                return f"{name} is not supported: {reasons[name]}"
        if sampling.frequency_penalty and (sampling.output_frequency_penalty or sampling.output_presence_penalty):
            return "frequency_penalty cannot be combined with output_frequency_penalty or output_presence_penalty"
        if admission.grammar is not None:
            if not admission.grammar.text:
                return "the grammar is empty"  # which would be none there
            if admission.grammar.kind not in self._abilities.grammar_kinds:
                return f"grammars of kind {admission.grammar.kind.value} are not supported"
            if admission.generated_tokens:
                return "an answer with a grammar cannot go on: guided decoding begins with the first new token"
        return None

    def arguments(self, admission: NewSequence) -> dict[str, Any]:
        """Keywords of `generate_async`. Raises ValueError or TypeError for what the library itself refuses."""
        arguments: dict[str, Any] = {
            "inputs": {"prompt_token_ids": list(admission.prompt)},
            "sampling_params": self._library.sampling_params(**self.sampling(admission)),
            "streaming": True,
        }
        if admission.logprobs.prompt:
            # Only what is computed is scored: a prompt that nobody else had is computed whole.
            arguments["cache_salt"] = f"scored-{next(self._scored)}"
        elif admission.cache_salt:
            arguments["cache_salt"] = admission.cache_salt
        return arguments

    def sampling(self, admission: NewSequence) -> dict[str, Any]:
        """Keywords of SamplingParams."""
        keywords: dict[str, Any] = {
            "max_tokens": admission.stopping.max_new_tokens,
            "detokenize": False,
            "include_stop_str_in_output": True,
        }
        keywords |= self._stopping(admission)
        keywords |= self._choosing(admission.sampling)
        if self._abilities.honours_sampling:
            keywords |= self._penalties(admission)
        if admission.sampling.logit_bias_ids:
            bias = np.zeros(self._vocab_size, dtype=np.float32)
            np.add.at(bias, list(admission.sampling.logit_bias_ids), admission.sampling.logit_bias_values)
            keywords["embedding_bias"] = bias
        if self._abilities.scores_tokens:
            keywords["logprobs"] = max(1, admission.logprobs.top_n)
        if admission.logprobs.prompt:
            keywords["prompt_logprobs"] = max(1, admission.logprobs.prompt_top_n)
        if admission.grammar is not None:
            keywords["guided_decoding"] = self._library.guided_decoding_params(**self._guide(admission.grammar))
        return keywords

    def _guide(self, grammar: Grammar) -> dict[str, str]:
        key = {GrammarKind.JSON_SCHEMA: "json", GrammarKind.REGEX: "regex", GrammarKind.LARK: "grammar"}[grammar.kind]
        text = grammar.text
        if grammar.kind is GrammarKind.JSON_SCHEMA and self._abilities.reads_guidance:
            schema = json.loads(text)
            if isinstance(schema, dict):  # a schema may also be true or false
                text = json.dumps({**schema, "x-guidance": JSON_OPTIONS})
        return {key: text}

    def _stopping(self, admission: NewSequence) -> dict[str, Any]:
        stopping = admission.stopping
        keywords: dict[str, Any] = {}
        stops = set(stopping.stop_token_ids)
        if stopping.eos_token_ids:
            # The model's own first, if it is among them: an engine may treat its end_id better than other stops.
            end = next((one for one in self._eos if one in stopping.eos_token_ids), min(stopping.eos_token_ids))
            keywords["end_id"] = end
            stops |= stopping.eos_token_ids - {end}
        else:
            keywords["end_id"] = self._eos[0] if self._eos else -1  # without one it would ask for a tokenizer
            keywords["ignore_eos"] = True
        keywords["pad_id"] = max(0, keywords["end_id"])
        if stops:
            keywords["stop_token_ids"] = sorted(stops)
        if stopping.min_new_tokens:
            keywords["min_tokens"] = stopping.min_new_tokens
        return keywords

    def _choosing(self, sampling: Sampling) -> dict[str, Any]:
        if sampling.greedy:
            return {"top_k": 1}
        keywords: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if 0 < sampling.top_k < self._vocab_size:  # more than there are is all of them
            keywords["top_k"] = sampling.top_k
        if self._abilities.honours_sampling:
            keywords["seed"] = sampling.seed
            if sampling.min_p:
                keywords["min_p"] = sampling.min_p
        return keywords

    def _penalties(self, admission: NewSequence) -> dict[str, Any]:
        sampling = admission.sampling
        keywords: dict[str, Any] = {}
        if sampling.repetition_penalty != 1:
            keywords["repetition_penalty"] = sampling.repetition_penalty
        if sampling.frequency_penalty:
            keywords["frequency_penalty"] = sampling.frequency_penalty
        if sampling.output_frequency_penalty or sampling.output_presence_penalty:
            keywords["frequency_penalty"] = sampling.output_frequency_penalty
            keywords["presence_penalty"] = sampling.output_presence_penalty
            # What was generated before a move is part of the prompt here, and counts.
            keywords["prompt_ignore_length"] = len(admission.prompt) - admission.generated_tokens
        return keywords
