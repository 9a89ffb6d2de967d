"""From a SamplingParams to what the engine works by: the worker's part of a submission. Near 1.2.1: base_worker.py,
_enqueue_request. Whatever it raises becomes the request's error."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_standin.choice import Candidates, Chooser, Draw, width_of
from trtllm_standin.guides import GuidedDecoder
from trtllm_standin.queues import AnyQueue
from trtllm_standin.release import Release
from trtllm_standin.scheduler import Limits
from trtllm_standin.sequences import LogprobWish, Request, Sequence
from trtllm_standin.settings import Fault

log = logging.getLogger(__name__)
NEVER_IMITATED = (
    "logits_processor",
    "apply_batched_logits_processor",
    "return_context_logits",
    "return_generation_logits",
    "additional_model_outputs",
    "lookahead_config",
    "thinking_token_budget",
)
HONOURED_ELSEWHERE = ("no_repeat_ngram_size", "top_p_decay")
"""What a sampler that honours SAMPLING_EXTRAS would honour too; the other one drops it in silence."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What a request is measured by."""

    release: Release
    limits: Limits
    honours: frozenset[str]
    """Which of release.SAMPLING_EXTRAS the sampler knows; the others are dropped in silence."""
    default_seed: int | None
    """The seed of a request that gives none. The C++ sampler has 0: unseeded answers to one prompt are all the same."""
    faults: Mapping[int, Fault]
    guided: GuidedDecoder | None
    refuses_guides: bool = False
    """Without a guided decoder a guide is refused (C++ executor, issue #2624), not dropped in silence (py_executor.py asks
    only whether there is a decoder)."""

    def take(
        self,
        request_id: int,
        prompt: list[int],
        params: Any,  # noqa: ANN401 - SamplingParams of either release
        queue: AnyQueue,
        *,
        streaming: bool,
        salt: str | None,
        priority: float,
    ) -> Request:
        """The request, ready for the engine. Raises ValueError or RuntimeError for one that cannot be served."""
        for name in (*NEVER_IMITATED, *(HONOURED_ELSEWHERE if self.honours else ())):
            if getattr(params, name, None):
                raise NotImplementedError(f"the stand-in does not imitate {name}")
        limit = self._limit(len(prompt), params.max_tokens)
        drops_stops = params.ignore_eos and self.release.eos_ignored_with_stops
        request = Request(
            id=request_id,
            queue=queue,
            prompt=prompt,
            limit=limit,
            end_id=-1 if params.ignore_eos else params.end_id,
            stop_words=[] if drops_stops else params._get_stop_words(),
            streaming=streaming,
            beam_width=params.best_of if params.use_beam_search else 1,
            salt=salt,
            priority=priority,
            wish=self._wish(params),
            faults=self.faults,
        )
        if request.beam_width > 1 and request.beam_width == self.limits.max_beam_width:
            raise NotImplementedError("the stand-in has no beam search")
        count = 1 if params.use_beam_search else params.best_of
        if count < 1:
            raise ValueError(f"Assertion failed: numReturnSequences > 0, got {count}")
        request.sequences = [Sequence(request, index, self._chooser(params, request, index)) for index in range(count)]
        request.open_sequences = count
        return request

    def _limit(self, prompt_length: int, max_tokens: int | None) -> int:
        """More than there is room for is cut in silence, down to a warning in the worker's log: the answer then ends by
        length, earlier than asked."""
        room = self.limits.max_seq_len - prompt_length
        if room <= 0:
            raise ValueError(f"`default_max_tokens` ({room}) must be greater than 0, `default_max_tokens`="
                             f"max_seq_len ({self.limits.max_seq_len}) - prompt length ({prompt_length})")  # fmt: skip
        if max_tokens is None:
            return room
        if max_tokens <= 0:
            raise ValueError(f"`max_tokens` ({max_tokens}) must be greater than 0")
        if max_tokens > room:
            log.warning("max_tokens (%s) is cut to what max_seq_len leaves (%s)", max_tokens, room)
        return min(max_tokens, room)

    def _wish(self, params: Any) -> LogprobWish:  # noqa: ANN401 - see take
        wanted = params.logprobs
        if not self.release.zero_logprobs and not wanted:
            wanted = None
        prompt_wanted = params.prompt_logprobs
        if not self.release.zero_logprobs and not prompt_wanted:
            prompt_wanted = None
        return LogprobWish(
            top=wanted,
            is_simple=getattr(params, "logprobs_simple_format", False),
            prompt_top=prompt_wanted,
            prompt_is_simple=getattr(params, "prompt_logprobs_simple_format", False),
            vocab_size=self.limits.vocab_size,
            always_scores_prompt=self.release.always_scores_prompt,
        )

    def _chooser(self, params: Any, request: Request, index: int) -> Chooser | None:  # noqa: ANN401 - see take
        """None for the plain case: the most probable token, whatever it is."""
        if params.guided_decoding is not None and self.guided is None and self.refuses_guides:
            raise RuntimeError(
                "Request is specified with GuidedDecodingParams, but GuidedDecoder is not setup. Please provide a valid "
                "GuidedDecodingConfig to setup GuidedDecoder."
            )
        guide = params.guided_decoding if self.guided is not None and _is_set(params.guided_decoding) else None
        min_p = params.min_p if "min_p" in self.honours else None
        prompt = request.prompt
        width = 1 if params._greedy_decoding else width_of(len(prompt), params.top_k, params.top_p, min_p)
        ends = frozenset({request.end_id} | {words[0] for words in request.stop_words if len(words) == 1})
        forbidden = frozenset(
            words[0] for words in params._get_bad_words() if len(words) == 1 and "bad_token_ids" in self.honours
        )
        bias = {} if params.embedding_bias is None else _entries(params.embedding_bias)
        repeats = self._avoids_repeats(params)
        suppresses = (params.min_tokens or 0) > 1
        if width == 1 and not (guide or forbidden or bias or repeats or suppresses):
            return None
        seed = params.seed if "seed" in self.honours and params.seed is not None else self.default_seed
        candidates = Candidates(
            prompt,
            Draw(width, seed, index),
            ends=ends,
            min_tokens=params.min_tokens or 0,
            forbidden=forbidden,
            avoids_repeats=repeats,
            bias=bias,
        )
        if guide is None or self.guided is None:
            return candidates
        return self.guided.chooser(guide, request.end_id, params.min_tokens or 0, candidates)

    def _avoids_repeats(self, params: Any) -> bool:  # noqa: ANN401 - see take
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return any(name in self.honours and (getattr(params, name) or value) > value for name, value in neutral.items())


def _is_set(guide: Any) -> bool:  # noqa: ANN401 - GuidedDecodingParams
    return guide is not None and bool(
        guide.json or guide.regex or guide.grammar or guide.json_object or guide.structural_tag
    )


def _entries(bias: Any) -> dict[int, float]:  # noqa: ANN401 - a tensor
    """Token → bias, where there is one. The tensor has a float for each token of the vocabulary."""
    flat = bias.reshape(-1)
    indices = flat.nonzero().reshape(-1)
    return dict(zip(indices.tolist(), flat[indices].tolist(), strict=True))
