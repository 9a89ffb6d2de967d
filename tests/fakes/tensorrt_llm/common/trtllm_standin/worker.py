"""From a SamplingParams to a sequence: the worker's part of a submission. Near 1.2.1: base_worker.py, _enqueue_request.

Every exception becomes the error of the request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_standin.choice import Candidates, Chooser, Draw, width_of
from trtllm_standin.guides import GuidedDecoder
from trtllm_standin.queues import AsyncQueue
from trtllm_standin.release import Release
from trtllm_standin.scheduler import Limits
from trtllm_standin.sequences import LogprobOptions, Request, Sequence
from trtllm_standin.settings import Fault

log = logging.getLogger(__name__)
NOT_IMITATED = (
    "stop",
    "bad",
    "bad_token_ids",
    "use_beam_search",
    "logits_processor",
    "apply_batched_logits_processor",
    "return_context_logits",
    "return_generation_logits",
    "additional_model_outputs",
    "lookahead_config",
    "thinking_token_budget",
    "no_repeat_ngram_size",
    "top_p_decay",
    "logprobs_simple_format",
    "prompt_logprobs_simple_format",
)
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Penalties → their neutral values."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Checks requests and turns them into sequences."""

    release: Release
    limits: Limits
    sampling_extras: frozenset[str]
    """The fields of release.SAMPLING_EXTRAS that the sampler supports; it silently ignores the others."""
    default_seed: int | None
    """Seed of requests without one. The C++ sampler has 0: equal prompts get equal answers."""
    faults: Mapping[int, Fault]
    guided: GuidedDecoder | None

    def take(
        self,
        request_id: int,
        prompt: list[int],
        params: Any,  # noqa: ANN401 - SamplingParams of either release
        queue: AsyncQueue,
        *,
        streaming: bool,
        salt: str | None,
    ) -> Sequence:
        """Return the sequence of a request. Raises ValueError or RuntimeError if it cannot be served."""
        for name in NOT_IMITATED:
            if getattr(params, name, None):
                raise NotImplementedError(f"the stand-in does not imitate {name}")
        if params.best_of != 1:
            raise NotImplementedError("the stand-in does not imitate several sequences per request")
        ignores_stops = params.ignore_eos and self.release.ignores_stops_with_eos
        request = Request(
            id=request_id,
            queue=queue,
            prompt=prompt,
            limit=self._limit(len(prompt), params.max_tokens),
            end_id=-1 if params.ignore_eos else params.end_id,
            stop_token_ids=frozenset(() if ignores_stops else params.stop_token_ids or ()),
            streaming=streaming,
            salt=salt,
            logprobs=LogprobOptions(
                top=self._count(params.logprobs),
                prompt_top=self._count(params.prompt_logprobs),
                vocab_size=self.limits.vocab_size,
                own_prompt_logprobs=self.release.own_prompt_logprobs,
            ),
            faults=self.faults,
        )
        return Sequence(request, self._chooser(params, request))

    def _count(self, wanted: int | None) -> int | None:
        return None if wanted == 0 and not self.release.zero_logprobs else wanted

    def _limit(self, prompt_length: int, max_tokens: int | None) -> int:
        """Return max_tokens, silently reduced to what max_seq_len leaves: the sequence then ends early, by length."""
        room = self.limits.max_seq_len - prompt_length
        if room <= 0:
            raise ValueError(
                f"`default_max_tokens` ({room}) must be greater than 0, `default_max_tokens`="
                f"max_seq_len ({self.limits.max_seq_len}) - prompt length ({prompt_length})"
            )
        if max_tokens is None:
            return room
        if max_tokens <= 0:
            raise ValueError(f"`max_tokens` ({max_tokens}) must be greater than 0")
        return min(max_tokens, room)

    def _chooser(self, params: Any, request: Request) -> Chooser | None:  # noqa: ANN401 - see take
        """Return None for a plain greedy sequence."""
        # py_executor.py silently ignores a guide without a decoder.
        guide = None if self.guided is None else params.guided_decoding
        min_p = params.min_p if "min_p" in self.sampling_extras else None
        prompt = request.prompt
        width = 1 if params._greedy_decoding else width_of(len(prompt), params.top_k, params.top_p, min_p)
        bias = {} if params.embedding_bias is None else _entries(params.embedding_bias)
        repeats = any(
            name in self.sampling_extras and (getattr(params, name) or neutral) > neutral
            for name, neutral in PENALTIES.items()
        )
        min_tokens = params.min_tokens or 0
        if width == 1 and guide is None and not bias and not repeats and min_tokens <= 1:
            return None
        has_seed = "seed" in self.sampling_extras and params.seed is not None
        candidates = Candidates(
            prompt,
            Draw(width, params.seed if has_seed else self.default_seed),
            ends=frozenset({request.end_id} | request.stop_token_ids),
            min_tokens=min_tokens,
            avoids_repeats=repeats,
            bias=bias,
        )
        if guide is None or self.guided is None:
            return candidates
        return self.guided.chooser(guide, request.end_id, min_tokens, candidates)


def _entries(bias: Any) -> dict[int, float]:  # noqa: ANN401 - a tensor
    """Return token → bias for the values that are not zero."""
    flat = bias.reshape(-1)
    indices = flat.nonzero().reshape(-1)
    return dict(zip(indices.tolist(), flat[indices].tolist(), strict=True))
