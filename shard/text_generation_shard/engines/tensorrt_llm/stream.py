"""Stream: turn the cumulative outputs of one request into updates.

TensorRT-LLM yields the same RequestOutput after each update, with all tokens so far. The stream counts the reported tokens itself:
the library's own difference is unreliable, and the list may shrink when a matched stop sequence is removed. The list of
log-probabilities is not cut then; it has an entry for each token, {id: Logprob} with the chosen token among them, or a float.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from text_generation_proto.values import FailureCode, FinishReason
from text_generation_shard.engine import NewSequence, PromptScores

RequestOutput = Any
"""TensorRT-LLM's RequestOutput, which is not typed here."""
Entry = Any
"""The log-probabilities of a position: {token id: Logprob}, or a float."""
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

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """One for each token; empty unless requested."""
    tops: Sequence[Top] = ()
    """One for each token; empty unless requested."""
    prompt_scores: PromptScores | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the engine's prefix cache; told with the first tokens."""
    drafted: Counter[str] | None = None
    """The fields of Drafting; None unless responses have them."""
    finish: FinishReason | None = None
    failure: tuple[FailureCode, str] | None = None

    def extend(self, later: StreamUpdate) -> None:
        self.token_ids = [*self.token_ids, *later.token_ids]
        self.logprobs = [*self.logprobs, *later.logprobs]
        self.tops = [*self.tops, *later.tops]
        self.prompt_scores = self.prompt_scores or later.prompt_scores
        self.cached_tokens = max(self.cached_tokens, later.cached_tokens)
        if later.drafted is not None:
            self.drafted = later.drafted + (self.drafted or Counter())
        self.finish, self.failure = later.finish, later.failure

    @property
    def is_end(self) -> bool:
        return self.finish is not None or self.failure is not None


@dataclass(slots=True, eq=False)
class Stream:
    """One request, from submission to end. `read` runs on the event loop; the engine's thread reads attributes."""

    sequence: NewSequence
    may_abort: bool = True
    """False: the request must run to its end."""
    drafts: bool = False
    """The engine drafts, and outputs may say how many tokens."""
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
    _most: int = field(init=False)
    _ends: frozenset[int] = field(init=False)
    _is_scored: bool = field(init=False)
    _awaits_prompt: bool = field(init=False)
    _drafted: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        stopping, wanted = self.sequence.stopping, self.sequence.logprobs
        self._most = stopping.max_new_tokens
        self._ends = stopping.eos_token_ids | stopping.stop_token_ids
        self._is_scored, self._awaits_prompt = wanted.tokens or wanted.top_n > 0, wanted.prompt

    def read(self, output: RequestOutput) -> StreamUpdate | None:
        """Return what is new in `output`; None if nothing is. Ends the stream at most once."""
        if self.ended:
            return None
        completion, first = output.outputs[0], self._reported
        new: list[int] = completion.token_ids[first : self._most]
        reason = completion.finish_reason
        if not new and reason is None:
            return None
        update = StreamUpdate(new)
        if first == 0:  # every output has them
            update.cached_tokens = getattr(output, "cached_tokens", 0) or 0
        if new:
            self.waiting = False
            if not self._ends.isdisjoint(new):
                self._find_end(update, new)
            self._reported = first + len(new)
            if self._reported == self._most:
                update.finish = FinishReason.LENGTH
            if self._is_scored:
                self._read_logprobs(update, new, (completion.logprobs or ())[first : self._reported])
            if self._awaits_prompt and completion.prompt_logprobs:
                self._awaits_prompt = False
                update.prompt_scores = self._prompt_scores(completion.prompt_logprobs)
        if reason is not None:
            self.ended_by_engine = True
            if update.finish is None:
                self._read_end(update, reason, completion.stop_reason)
        self.ended = update.is_end
        if self.drafts and (drafted := getattr(output, "spec_dec_totals", None)) is not None:
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

    def _find_end(self, update: StreamUpdate, new: list[int]) -> None:
        """Cut the new tokens after the token that ends the sequence.

        The engine does not always stop there: with `ignore_eos`, ≥ 1.3 ignores stop tokens as well.
        """
        stopping = self.sequence.stopping
        for at, token_id in enumerate(new, 1):
            if token_id in self._ends and self._reported + at > stopping.min_new_tokens:
                is_eos = token_id in stopping.eos_token_ids
                update.finish = FinishReason.EOS_TOKEN if is_eos else FinishReason.STOP_SEQUENCE
                del new[at:]
                return

    def _read_end(self, update: StreamUpdate, reason: str, stop: object) -> None:
        """Handle an end that the engine reports and `_find_end` does not explain."""
        last = update.token_ids[-1] if update.token_ids else None
        if reason != "stop" or (last not in self._ends and not isinstance(stop, int)):
            message = _UNEXPLAINED_ENDS.get(reason, f"the engine ended the sequence: {reason}")
            update.failure = FailureCode.STEP, message
            return
        # Before min_new_tokens the engine's samplers hold off end_id only.
        if last not in self._ends and isinstance(stop, int):
            # The engine removed the matched token; report it as the last one.
            self._reported, last = self._reported + 1, stop
            update.token_ids = [*update.token_ids, stop]
            update.logprobs = [*update.logprobs, math.nan] if self._is_scored else ()
            update.tops = [*update.tops, ((), ())] if self.sequence.logprobs.top_n else ()
        if self._reported == self._most:
            update.finish = FinishReason.LENGTH
        else:
            is_eos = last in self.sequence.stopping.eos_token_ids
            update.finish = FinishReason.EOS_TOKEN if is_eos else FinishReason.STOP_SEQUENCE

    def _read_logprobs(self, update: StreamUpdate, new: list[int], entries: Sequence[Entry]) -> None:
        if missing := len(new) - len(entries):  # NaN means unknown
            entries = [*entries, *[math.nan] * missing]
        update.logprobs = list(map(_chosen, entries, new))
        if top_n := self.sequence.logprobs.top_n:
            update.tops = [_best(entry, top_n) for entry in entries]

    def _prompt_scores(self, entries: Sequence[Any]) -> PromptScores:
        """Return the log-probabilities of the prompt's tokens, NaN for the first: entry i is for token i + 1."""
        sequence = self.sequence
        prompt, top_n = sequence.prompt, sequence.logprobs.prompt_top_n
        scores = PromptScores(sequence.slot, [math.nan] * len(prompt), [((), ())] * len(prompt) if top_n else None)
        # The last entry is for the first new token. Entries of cached tokens are missing at the front.
        first = max(1, 1 + len(prompt) - len(entries))
        for at, entry in zip(range(first, len(prompt)), entries, strict=False):
            scores.logprobs[at] = _chosen(entry, prompt[at])
            if scores.tops is not None:
                scores.tops[at] = _best(entry, top_n)
        return scores


def _chosen(entry: Entry, token_id: int) -> float:
    """Return the log-probability of a token; NaN if it is unknown."""
    value: Any = entry.get(token_id, math.nan) if isinstance(entry, dict) else entry
    return float(getattr(value, "logprob", value))


def _best(entry: Entry, top_n: int) -> Top:
    """Return the best tokens; none if the entry is one number."""
    known = entry if isinstance(entry, dict) else {}
    best = sorted(((_chosen(entry, each), each) for each in known), key=lambda pair: -pair[0])[:top_n]
    return tuple(each for _, each in best), tuple(value for value, _ in best)
