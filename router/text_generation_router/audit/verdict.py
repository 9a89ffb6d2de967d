"""The verdict of an audit: served tokens against their scores in a replay. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isnan
from typing import NamedTuple

from text_generation_proto.values import Sampling

MEAN_OF = 8
"""Tokens from which on the mean over the text counts: that of fewer is hardly nearer to 0 than each is."""


class Verdict(Enum):
    """The result of an audit."""

    SAME = "same"
    DIFFERENT = "different"
    UNJUDGED = "unjudged"
    """No token has a score: the grammar was not compiled in time, or it cannot be followed."""
    FAILED = "failed"
    """The replay ended with an error."""
    DROPPED = "dropped"
    """It was never replayed: the memory for kept requests was full, or clients needed the room each time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far scores may differ between two computations of the same text. docs/audits.md has the measurements."""

    token: float
    """Largest difference of a token's log-probability, in nats."""
    mean: float
    """Largest mean of the differences over a text."""
    odd: float
    """Share of a text whose tokens may be drawn otherwise: a draw, or the set that top_k and its like keep, may turn on less than
    any bound. One token may always be so."""


EXACT = Bounds(token=1e-4, mean=2e-5, odd=0.0)
ROUNDED = Bounds(token=0.05, mean=0.02, odd=0.25)


def bounds_of(engine: str, dtype: str) -> Bounds:
    """Return the bounds for an engine that computes in `dtype`."""
    return EXACT if engine == "echo" or dtype == "float32" else ROUNDED


class Scores(NamedTuple):
    """The scores of a replay in columns: see TokenScores in shard.proto."""

    logprobs: Sequence[float]
    drawn_ids: Sequence[int]
    drawn_logprobs: Sequence[float]


class Judgement(NamedTuple):
    """A verdict, and the first token that led to it."""

    verdict: Verdict
    position: int = 0
    """Index among the new tokens."""
    served: int = 0
    drawn: int = 0
    difference: float = 0.0
    """Of the log-probabilities of the served token, in nats; or the mean of all differences."""
    largest: float = 0.0
    """The largest difference in the text that is no exception."""


def judge(
    tokens: Sequence[int], logprobs: Sequence[float], scores: Scores, sampling: Sampling, bounds: Bounds
) -> Judgement:
    """Compare served `tokens`, with the `logprobs` that they were served with (NaN: not known), with their `scores`.

    A token is wrong if its log-probability is another one, or a greedy one is not among the most probable. It is odd if it would
    be drawn otherwise although its log-probability agrees, or if that may have changed because another token was cut off.
    """
    cuts = bool(sampling.top_k or sampling.min_p or sampling.top_p < 1 or sampling.typical_p < 1)
    wrong: Judgement | None = None
    odd: list[Judgement] = []
    differences: list[float] = []
    known = 0
    for at, (token, served, replayed, drawn, best) in enumerate(zip(tokens, logprobs, *scores, strict=False)):
        if isnan(replayed):
            continue
        known += 1
        difference = 0.0 if isnan(served) else replayed - served
        behind = best - replayed if drawn != token and sampling.greedy else 0.0
        judgement = Judgement(Verdict.DIFFERENT, at, token, drawn, difference or behind)
        if max(abs(difference), behind) > bounds.token:
            if not cuts:
                wrong = wrong or judgement
            else:
                odd.append(judgement)
        elif drawn != token and not sampling.greedy:
            odd.append(judgement)
        else:
            differences.append(difference)
    if not known:
        return Judgement(Verdict.UNJUDGED)
    largest = max(map(abs, differences), default=0.0)
    if wrong is None and len(odd) > 1 + bounds.odd * known:
        wrong = odd[0]
    if wrong is None and len(differences) >= MEAN_OF:
        mean = sum(differences) / len(differences)
        if abs(mean) > bounds.mean:
            wrong = Judgement(Verdict.DIFFERENT, len(tokens) - 1, tokens[-1], tokens[-1], mean)
    if wrong is not None:
        return wrong._replace(largest=largest)
    return Judgement(Verdict.SAME, largest=largest)
