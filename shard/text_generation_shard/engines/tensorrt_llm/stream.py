"""Stream: turn the cumulative outputs of one request into updates.

TensorRT-LLM yields the same RequestOutput after each update, with all tokens so far. The stream counts the reported tokens itself:
the library's own difference is unreliable, and the list may shrink when a matched stop sequence is removed. The list of
log-probabilities is not cut then; it has an entry for each token, {id: Logprob} with the chosen token among them, or a float.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from text_generation_proto.values import FailureCode, FinishReason
from text_generation_shard.engine import NewSequence, PromptScores

RequestOutput = Any
"""TensorRT-LLM's RequestOutput, which is not typed here."""
Top = tuple[tuple[int, ...], tuple[float, ...]]
"""The most probable tokens at a position, and their log-probabilities, best first."""
_UNEXPLAINED_ENDS = {
    "stop": "the engine stopped the sequence without a stop token",
    "length": "the engine's own limit on the length of a sequence was reached",
    "timeout": "the engine gave up on the sequence",
    "cancelled": "the engine cancelled the sequence",
}
"""finish_reason → error message, if no token explains the end."""


@dataclass(slots=True, eq=False)
class StreamUpdate:
    """The output of a stream since the previous update."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """One for each token; empty unless requested."""
    tops: list[Top] = field(default_factory=list)
    """One for each token; empty unless requested."""
    prompt_scores: PromptScores | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the engine's prefix cache; told with the first tokens."""
    drafted: Counter[str] = field(default_factory=Counter)
    """The fields of Drafting; empty unless responses have them."""
    finish: FinishReason | None = None
    failure: tuple[FailureCode, str] | None = None

    def extend(self, later: StreamUpdate) -> None:
        """Append the next update of the same stream."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.tops += later.tops
        self.prompt_scores = self.prompt_scores or later.prompt_scores
        self.cached_tokens = max(self.cached_tokens, later.cached_tokens)
        self.drafted += later.drafted
        self.finish, self.failure = later.finish, later.failure

    @property
    def is_end(self) -> bool:
        """True if the stream ended with this update."""
        return self.finish is not None or self.failure is not None


@dataclass(slots=True, eq=False)
class Stream:
    """One request, from submission to end. `read` runs on the event loop; the engine's thread reads attributes."""

    sequence: NewSequence
    may_abort: bool = True
    """False: the request must run to its end."""
    aborted: bool = False
    result: RequestOutput = None
    """The return value of `generate_async`; None before the call."""
    dropped: bool = False
    """The sequence was released; later output is discarded."""
    ended: bool = False
    ended_by_engine: bool = False
    """The engine reported the end itself."""
    waiting: bool = True
    """No token has arrived yet."""
    _reported: int = 0
    _prompt_reported: bool = False
    _drafted: Counter[str] = field(default_factory=Counter)

    def read(self, output: RequestOutput) -> StreamUpdate | None:
        """Return what is new in `output`; None if nothing is. Ends the stream at most once."""
        if self.ended:
            return None
        completion, wanted = output.outputs[0], self.sequence.logprobs
        update = StreamUpdate()
        ids: Sequence[int] = completion.token_ids
        first = self._reported
        if len(ids) > first:
            self.waiting = False
            update.token_ids = list(ids[first : self.sequence.stopping.max_new_tokens])
            self._find_end(update)
            self._reported += len(update.token_ids)
            if wanted.tokens or wanted.top_n:
                self._read_logprobs(update, completion.logprobs, first)
            if wanted.prompt and not self._prompt_reported and completion.prompt_logprobs:
                self._prompt_reported = True
                update.prompt_scores = self._prompt_scores(completion.prompt_logprobs)
        if update.finish is None and completion.finish_reason is not None:
            self._read_end(update, completion.finish_reason, completion.stop_reason)
        self.ended = update.is_end
        self.ended_by_engine = completion.finish_reason is not None
        if not update.token_ids and not update.is_end:
            return None
        if first == 0:  # every output has them
            update.cached_tokens = getattr(output, "cached_tokens", 0) or 0
        if (drafted := getattr(output, "spec_dec_totals", None)) is not None:
            # Sums for the request: accepted and drafted tokens, and the drafts that had a token at each position.
            drafts = next(iter(getattr(output, "per_pos_drafted", None) or ()), 0)
            totals = Counter(drafts=int(drafts), draft_tokens=int(drafted[1]), accepted_tokens=int(drafted[0]))
            update.drafted, self._drafted = totals - self._drafted, totals
        return update

    def fail(self, code: FailureCode, message: str) -> StreamUpdate | None:
        """End the stream with an error; None if it has already ended."""
        if self.ended:
            return None
        self.ended = True
        return StreamUpdate(failure=(code, message))

    def _find_end(self, update: StreamUpdate) -> None:
        """Cut the new tokens after the token that ends the sequence.

        The engine does not always stop there: with `ignore_eos`, ≥ 1.3 ignores stop tokens as well.
        """
        stopping = self.sequence.stopping
        if stopping.eos_token_ids or stopping.stop_token_ids:
            for at, token_id in enumerate(update.token_ids, 1):
                if self._reported + at <= stopping.min_new_tokens:
                    continue
                if token_id in stopping.eos_token_ids:
                    update.finish = FinishReason.EOS_TOKEN
                elif token_id in stopping.stop_token_ids:
                    update.finish = FinishReason.STOP_SEQUENCE
                else:
                    continue
                del update.token_ids[at:]
                break
        if self._reported + len(update.token_ids) == stopping.max_new_tokens:
            update.finish = FinishReason.LENGTH

    def _read_end(self, update: StreamUpdate, reason: str, stop: object) -> None:
        """Handle an end that the engine reports and `_find_end` does not explain."""
        stopping, wanted = self.sequence.stopping, self.sequence.logprobs
        last = update.token_ids[-1] if update.token_ids else None
        if reason == "stop" and last in stopping.eos_token_ids | stopping.stop_token_ids:
            # Before min_new_tokens: the engine's samplers hold off end_id only.
            update.finish = FinishReason.EOS_TOKEN if last in stopping.eos_token_ids else FinishReason.STOP_SEQUENCE
        elif reason == "stop" and isinstance(stop, int):
            # The engine removed the matched token; report it as the last one.
            self._reported += 1
            update.token_ids.append(stop)
            update.logprobs += [math.nan] if wanted.tokens or wanted.top_n else []
            update.tops += [((), ())] if wanted.top_n else []
            is_eos = stop in stopping.eos_token_ids
            update.finish = FinishReason.EOS_TOKEN if is_eos else FinishReason.STOP_SEQUENCE
            if self._reported == stopping.max_new_tokens:
                update.finish = FinishReason.LENGTH
        else:
            update.failure = (
                FailureCode.STEP,
                _UNEXPLAINED_ENDS.get(reason, f"the engine ended the sequence: {reason}"),
            )

    def _read_logprobs(self, update: StreamUpdate, logprobs: Sequence[Any] | None, first: int) -> None:
        known = () if logprobs is None else logprobs
        top_n = self.sequence.logprobs.top_n
        for position, token_id in enumerate(update.token_ids, first):
            # The list may be shorter than the list of tokens; NaN means unknown.
            chosen, best = _read_entry(known[position] if position < len(known) else math.nan, token_id, top_n)
            update.logprobs.append(chosen)
            if top_n:
                update.tops.append(best)

    def _prompt_scores(self, entries: Sequence[Any]) -> PromptScores:
        """Return the log-probabilities of the prompt's tokens, NaN for the first: entry i is for token i + 1."""
        sequence = self.sequence
        prompt, top_n = sequence.prompt, sequence.logprobs.prompt_top_n
        scores = PromptScores(sequence.slot, [math.nan] * len(prompt), [((), ())] * len(prompt) if top_n else None)
        # The last entry is for the first new token. Entries of cached tokens are missing at the front.
        first = max(1, 1 + len(prompt) - len(entries))
        for at, entry in zip(range(first, len(prompt)), entries, strict=False):
            scores.logprobs[at], best = _read_entry(entry, prompt[at], top_n)
            if scores.tops is not None:
                scores.tops[at] = best
        return scores


def _read_entry(entry: object, token_id: int, top_n: int) -> tuple[float, Top]:
    """Return the log-probability of a token, NaN if it is unknown, and the best tokens; an entry may be one number."""
    if not isinstance(entry, Mapping):
        return _value(entry), ((), ())
    chosen = _value(entry.get(token_id, math.nan))
    if not top_n:
        return chosen, ((), ())
    best = sorted(((_value(value), each) for each, value in entry.items()), key=lambda pair: -pair[0])[:top_n]
    return chosen, (tuple(each for _, each in best), tuple(value for value, _ in best))


def _value(entry: object) -> float:
    """Return the log-probability in `entry`, a float or a Logprob."""
    return float(cast("float", getattr(entry, "logprob", entry)))
