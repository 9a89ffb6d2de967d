"""The verdict of an audit: served tokens against their scores in a replay. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isinf, isnan
from typing import NamedTuple

from text_generation_proto.values import Sampling

MEAN_OF = 8
"""Tokens over which the mean of a text is taken at least: that of fewer is hardly nearer to 0 than each is."""


class Verdict(Enum):
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
    """The largest differences between the scores of two computations of a text. docs/audits.md has the measurements."""

    token: float
    """Largest difference of a token's log-probability, in nats."""
    mean: float
    """Largest mean of the differences over a text."""
    wrong: float | None
    """Share of a text beyond `token`, besides one token; None: no token may be."""
    odd: float
    """Share of a text, besides one token, that may be beyond `token` where stages drop tokens, or be drawn differently: a difference
    smaller than any bound may change either."""
    draws: bool
    """True if draws count: among many tokens that are equally probable a rounded number changes most of them."""


EXACT = Bounds(token=1e-4, mean=2e-5, wrong=None, odd=0.1, draws=True)
ROUNDED = Bounds(token=0.5, mean=0.1, wrong=0.02, odd=0.25, draws=False)


def bounds_of(engine: str, dtype: str, kv_cache_dtype: str) -> Bounds:
    """Return the bounds for an engine that computes in `dtype`, with an FP8 cache unless `kv_cache_dtype` is empty."""
    # The nearest FP8 number may be another one after the smallest difference, and is then 6 to 12 % off.
    return EXACT if engine == "echo" or (dtype == "float32" and not kv_cache_dtype) else ROUNDED


class Scores(NamedTuple):
    """The scores of a replay in columns: see TokenScores in shard.proto."""

    logprobs: Sequence[float]
    drawn_ids: Sequence[int]
    drawn_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and the first token that led to it."""

    verdict: Verdict
    position: int = 0
    """Index among the new tokens."""
    served: int = 0
    drawn: int = 0
    difference: float = 0.0
    """The difference of the log-probabilities of the served token, in nats, or the mean of all."""


def judge(
    tokens: Sequence[int], logprobs: Sequence[float], scores: Scores, sampling: Sampling, bounds: Bounds
) -> Judgement:
    """Compare served `tokens`, with the `logprobs` that they were served with (NaN: not known), with their `scores`.

    A token is wrong if its log-probability is another one, or a greedy one is not among the most probable. It is odd if it would
    be drawn otherwise although its log-probability agrees, or if that may have changed because another token was cut off.
    """
    wrong: list[Judgement] = []
    odd: list[Judgement] = []
    differences: list[float] = []
    known = 0
    for at, (token, served, replayed, drawn, best) in enumerate(zip(tokens, logprobs, *scores, strict=False)):
        if isnan(replayed):
            continue
        known += 1
        # Of a token whose log-probability was not reported it is known only that it could be chosen.
        difference = (replayed if isinf(replayed) else 0.0) if isnan(served) else replayed - served
        behind = best - replayed if drawn != token and sampling.greedy else 0.0
        judgement = Judgement(Verdict.DIFFERENT, at, token, drawn, difference or behind)
        if max(abs(difference), behind) > bounds.token:
            (odd if sampling.cuts else wrong).append(judgement)
            continue
        if not isnan(served):
            differences.append(difference)
        if bounds.draws and drawn != token and not sampling.greedy:
            odd.append(judgement)
    if not known:
        return Judgement(Verdict.UNJUDGED)
    if len(wrong) > (0 if bounds.wrong is None else 1 + bounds.wrong * known):
        return wrong[0]
    if len(odd) > 1 + bounds.odd * known:
        return odd[0]
    mean = sum(differences) / max(MEAN_OF, len(differences))
    if abs(mean) > bounds.mean:
        return Judgement(Verdict.DIFFERENT, len(tokens) - 1, tokens[-1], tokens[-1], mean)
    return Judgement(Verdict.SAME)
