"""The verdict of an audit: served tokens against their scores in a replay; and the feature that findings have in common. Pure."""

from collections import Counter, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from math import isinf, isnan
from typing import NamedTuple

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import Sampling
from text_generation_router.audit.served import FEATURES

MEAN_OF = 8
"""Tokens over which the mean of a text is taken at least: that of fewer is hardly nearer to 0 than each is."""


class Verdict(StrEnum):
    """docs/audits.md tells when each is given."""

    SAME = "same"
    DIFFERENT = "different"
    UNJUDGED = "unjudged"
    FAILED = "failed"
    DROPPED = "dropped"


class Bounds(NamedTuple):
    """The differences between the scores of two computations of a text that are none. docs/audits.md has the measurements."""

    token: float
    """Largest difference of a token's log-probability, in nats. That of the mean over a text is a fifth."""
    rounded: bool = False
    """Some tokens may differ by more, and no draw counts: among many tokens that are equally probable rounding changes most."""

    @staticmethod
    def of(info: pb.InfoResponse, *, has_states: bool = False) -> "Bounds":
        """Return the bounds for an engine, before any are measured."""
        # The nearest FP8 number may be another one after the smallest difference, and is then 6 to 12 % off.
        if info.engine != "echo" and (info.dtype != "float32" or info.kv_cache_dtype):
            return ROUNDED
        return RECURRENT if has_states else EXACT

    @staticmethod
    def measured(served: Sequence[float], replayed: Sequence[float]) -> "Bounds":
        """Return bounds for rounded types that allow eight times the largest difference of a text from its replay."""
        differences = [abs(a - b) for a, b in zip(served, replayed, strict=False) if not isnan(a - b)]
        return Bounds(min(WIDEST, max(0.25, 8 * max(differences))), rounded=True) if differences else ROUNDED


EXACT = Bounds(1e-4)
RECURRENT = Bounds(5e-3)  # states, which prefill computes in chunks
ROUNDED = Bounds(0.5, rounded=True)
WIDEST = 4.0
"""Widest measured bound, in nats: activations in FP8 lie an order of magnitude further apart than in bfloat16."""


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
    tokens: Sequence[int], logprobs: Sequence[float], scores: pb.TokenScores, sampling: Sampling, bounds: Bounds
) -> Judgement:
    """Compare served `tokens`, with the `logprobs` that they were served with (NaN: not known), with their `scores`.

    A token is wrong if its log-probability is another one, or a greedy one is not among the most probable. It is odd if it would
    be drawn otherwise although its log-probability agrees, or if that may have changed because another token was cut off.
    """
    wrong: list[Judgement] = []
    odd: list[Judgement] = []
    differences: list[float] = []
    known = 0
    columns = tokens, logprobs, scores.logprobs, scores.drawn_ids, scores.drawn_logprobs
    for at, (token, served, replayed, drawn, best) in enumerate(zip(*columns, strict=False)):
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
        if not bounds.rounded and drawn != token and not sampling.greedy:
            odd.append(judgement)
    if not known:
        return Judgement(Verdict.UNJUDGED)
    if len(wrong) > (1 + 0.02 * known if bounds.rounded else 0):
        return wrong[0]
    if len(odd) > 1 + (0.25 if bounds.rounded else 0.1) * known:
        return odd[0]
    mean = sum(differences) / max(MEAN_OF, len(differences))
    if abs(mean) > bounds.token / 5:
        return Judgement(Verdict.DIFFERENT, len(tokens) - 1, tokens[-1], tokens[-1], mean)
    return Judgement(Verdict.SAME)


ISOLATE_AFTER = 3
"""Findings that share a feature and nothing else after which that feature is switched off."""
COMMON = 4
"""Exponent of the share of the findings that used a feature: a feature that a third did not use is unlikely."""
USUAL = 0.5
"""A feature that more than this share of confirmed texts used is no explanation."""


class Findings:
    """Counts of the features of texts that were confirmed, and of those that were not."""

    def __init__(self) -> None:
        self._same = Counter[str]()
        self._different = Counter[str]()
        self._confirmed = self.total = 0
        self._last: deque[Set[str]] = deque(maxlen=ISOLATE_AFTER)

    def confirm(self, features: Set[str]) -> None:
        """Count a text that its replay confirmed."""
        self._same.update(features)
        self._confirmed += 1

    def add(self, features: Set[str]) -> str:
        """Count a finding; return the feature that it is likely due to, "none" if it used none.

        That is one that nearly all findings used, and few confirmed texts: see COMMON.
        """
        self._different.update(features)
        self.total += 1
        self._last.append(features)
        used = [name for name in FEATURES if name in features]
        share = {name: (self._different[name] / self.total) ** COMMON - self._usual(name) for name in used}
        return max(used, key=share.__getitem__, default="none")

    @property
    def shared(self) -> str | None:
        """The only unusual feature, or the replica, that the last ISOLATE_AFTER findings share; None if there is none."""
        if len(self._last) < ISOLATE_AFTER:
            return None
        common = {name for name in frozenset.intersection(*map(frozenset, self._last)) if self._usual(name) <= USUAL}
        if "offload" in common:
            common.discard("prefix")  # a loaded prefix is a cached one
        return common.pop() if len(common) == 1 else None

    def _usual(self, name: str) -> float:
        return (self._same[name] + 1) / (self._confirmed + 2)
