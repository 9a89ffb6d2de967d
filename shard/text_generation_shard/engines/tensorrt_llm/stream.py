"""Stream: what one request has brought so far, read from the engine's cumulative outputs.

TensorRT-LLM hands out one object again and again, with all tokens so far. How many of them were told is counted here:
its own difference is not to be trusted, and the list may shrink when a matched stop is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from text_generation_proto.values import FailureCode, FinishReason
from text_generation_shard.engine import NewSequence, PromptScores
from text_generation_shard.engines.tensorrt_llm.api import RequestOutput

_ENDS = {
    "stop": "the engine stopped the sequence without a token that says why",
    "length": "the engine's own limit on the length of a sequence was reached",
    "timeout": "the engine gave up on the sequence",
    "cancelled": "the engine cancelled the sequence",
}
"""What the engine may say when no token ended the sequence, in our words."""


@dataclass(slots=True, eq=False)
class News:
    """What a stream has brought since it was last asked."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    """For each token, if asked for: the most probable ones and their logprobs, best first."""
    prompt_scores: PromptScores | None = None
    finish: FinishReason | None = None
    failure: tuple[FailureCode, str] | None = None

    def add(self, later: News) -> None:
        """What came after this, of the same stream."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.tops += later.tops
        self.prompt_scores = self.prompt_scores or later.prompt_scores
        self.finish, self.failure = later.finish, later.failure

    @property
    def is_end(self) -> bool:
        """Whether the stream has ended with this."""
        return self.finish is not None or self.failure is not None


class Stream:
    """One request, from its admission to its end. Read on the event loop's thread, asked on the engine's."""

    __slots__ = (
        "_ends_at",
        "_prompt_told",
        "_told",
        "admission",
        "dropped",
        "ended",
        "ended_by_engine",
        "result",
        "waiting",
    )

    def __init__(self, admission: NewSequence) -> None:
        self.admission = admission
        self.result: RequestOutput | None = None
        """What `generate_async` returned; None until then."""
        self.dropped = False
        """Nobody waits for it any more."""
        self.ended = False
        self.ended_by_engine = False
        """The engine knows, too."""
        self.waiting = True
        """No token has come yet."""
        self._told = 0
        self._ends_at = admission.stopping.max_new_tokens
        self._prompt_told = not admission.logprobs.prompt

    def read(self, output: RequestOutput) -> News | None:
        """What is new in `output`; None if nothing is. Ends the stream at most once."""
        if self.ended:
            return None
        completion = output.outputs[0]
        news = News()
        ids: Sequence[int] = completion.token_ids
        first = self._told
        if len(ids) > first:
            self.waiting = False
            news.token_ids = list(ids[first : self._ends_at])
            self._find_end(news)
            self._told += len(news.token_ids)
            self._read_logprobs(news, completion.logprobs, first)
            if not self._prompt_told and completion.prompt_logprobs:
                self._prompt_told = True
                news.prompt_scores = self._prompt_scores(completion.prompt_logprobs)
        if news.finish is None and completion.finish_reason is not None:
            self._read_end(news, completion.finish_reason, completion.stop_reason)
        self.ended = news.is_end
        self.ended_by_engine = completion.finish_reason is not None
        return news if news.token_ids or news.is_end else None

    def fail(self, code: FailureCode, message: str) -> News | None:
        """The stream ends with an error; None if it had ended."""
        if self.ended:
            return None
        self.ended = True
        return News(failure=(code, message))

    def _find_end(self, news: News) -> None:
        """Cut what is new at the token that ends the sequence.

        The engine looks for it too, but not always: with `ignore_eos`, ≥ 1.3 forgets the stop tokens as well.
        """
        stopping = self.admission.stopping
        if stopping.eos_token_ids or stopping.stop_token_ids:
            for at, token_id in enumerate(news.token_ids, 1):
                if self._told + at < stopping.min_new_tokens:
                    continue
                if token_id in stopping.eos_token_ids:
                    news.finish = FinishReason.EOS_TOKEN
                elif token_id in stopping.stop_token_ids:
                    news.finish = FinishReason.STOP_SEQUENCE
                else:
                    continue
                del news.token_ids[at:]
                break
        if self._told + len(news.token_ids) == self._ends_at:
            news.finish = FinishReason.LENGTH

    def _read_end(self, news: News, reason: str, stop: object) -> None:
        """The engine says that it has ended the sequence, and `_find_end` saw no reason."""
        stopping = self.admission.stopping
        last = news.token_ids[-1] if news.token_ids else None
        if reason == "stop" and last in stopping.eos_token_ids | stopping.stop_token_ids:
            # Before min_new_tokens: of several ends the engine's samplers hold off end_id alone.
            news.finish = FinishReason.EOS_TOKEN if last in stopping.eos_token_ids else FinishReason.STOP_SEQUENCE
        elif reason == "stop" and isinstance(stop, int):
            # A matched token that was cut off: a sequence finishes with a token, and this is it.
            self._told += 1
            news.token_ids.append(stop)
            news.logprobs.append(math.nan)
            news.tops += [((), ())] if self.admission.logprobs.top_n else []
            is_eos = stop in stopping.eos_token_ids
            news.finish = FinishReason.EOS_TOKEN if is_eos else FinishReason.STOP_SEQUENCE
            if self._told == self._ends_at:
                news.finish = FinishReason.LENGTH
        else:
            news.failure = (FailureCode.STEP, _ENDS.get(reason, f"the engine ended the sequence: {reason}"))

    def _read_logprobs(self, news: News, logprobs: Sequence[Any] | None, first: int) -> None:
        known = () if logprobs is None else logprobs
        top_n = self.admission.logprobs.top_n
        for place, token_id in enumerate(news.token_ids, first):
            # The list may be shorter than that of the tokens: NaN says that a value is not known.
            entry = known[place] if place < len(known) else math.nan
            if isinstance(entry, Mapping):
                chosen = entry.get(token_id)
                news.logprobs.append(math.nan if chosen is None else _value(chosen))
                if top_n:
                    news.tops.append(_best(entry, top_n))
            else:
                news.logprobs.append(_value(entry))
                if top_n:
                    news.tops.append(((), ()))

    def _prompt_scores(self, entries: Sequence[Any]) -> PromptScores:
        """Log-probabilities of the prompt's tokens, NaN for the first: entry i is about token i + 1."""
        admission = self.admission
        prompt, top_n = admission.prompt, admission.logprobs.prompt_top_n
        scores = PromptScores(admission.slot, [math.nan] * len(prompt), [((), ())] * len(prompt) if top_n else None)
        # The last entry is about the first new token. Of a prompt that was computed in part the first ones are missing.
        first = max(1, 1 + len(prompt) - len(entries))
        for at, entry in zip(range(first, len(prompt)), entries, strict=False):
            if isinstance(entry, Mapping):
                chosen = entry.get(prompt[at])
                scores.logprobs[at] = math.nan if chosen is None else _value(chosen)
                if scores.tops is not None:
                    scores.tops[at] = _best(entry, top_n)
            else:
                scores.logprobs[at] = _value(entry)
        return scores


def _value(entry: object) -> float:
    """A log-probability, bare or wrapped with its rank."""
    return float(cast("float", getattr(entry, "logprob", entry)))


def _best(entry: Mapping[int, Any], n: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    best = sorted(((_value(value), token_id) for token_id, value in entry.items()), key=lambda one: -one[0])[:n]
    return tuple(token_id for _, token_id in best), tuple(value for value, _ in best)
