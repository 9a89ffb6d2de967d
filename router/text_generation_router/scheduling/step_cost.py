"""StepCost: what a step of one replica takes, learned from the steps it made.

Seconds are taken to be linear in what the step computes: a fixed part, a part for each prompt token, for each decoding
row, for each token of context those rows read, and for each (query, key) pair of the chunks' attention; none of them
negative. They are fitted by least squares on relative errors, with two departures from the book:

- Old steps are forgotten only in the direction a new one speaks about (directional forgetting: Cao and Schwartz,
  "A directional forgetting algorithm based on the decomposition of the information matrix", Automatica 36, 2000).
  Thousands of steps without a prompt take nothing from what is known of prompts.
- A step far from what was foreseen counts as if it were a little off (Huber): collections of garbage and stolen
  processors happen. Several such steps in a row are no accident any more, and are believed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Vector = tuple[float, float, float, float, float]

# What the parts cost relative to the fixed one, as far as anyone can say before the first step: the geometric middle
# of small models on processors and large ones on GPUs. Each may be many times off.
_USUAL: _Vector = (1.0, 1.2e-2, 2e-2, 1e-5, 1.2e-6)
_USUAL_WORTH: _Vector = (1e-3, 1e-3, 1e-3, 1e-3, 1e-2)
"""What that is worth, in steps. More for attention: a first prompt that took too long must not put it down to that, as
the short chunks that follow could not tell."""
_FORGET = 1 / 20
"""Share of what is known about a direction that a step in it replaces."""
_MIXED_WEIGHT = 4.0
"""Weight of a step with prompts and decoding rows: such steps are what a budget is asked for, and their short chunks
are computed less efficiently than whole prompts."""

_LEAST_LIMIT = 0.15
_LIMIT_SPREADS = 4.0
"""A relative error above this many usual ones (and the least limit) is doubted."""
_SPREAD_RATE = 1 / 20
_PATIENCE_SLOW = 6
_PATIENCE_FAST = 3
"""Doubted steps in a row after which they are believed. Accidents make steps slow; nothing makes them fast."""
_BELIEVED_WEIGHT = 4.0
_KEPT_AT_CHANGE = 0.25
"""Share of what is known that outlives a change of the machine."""
_FARTHEST = 50.0
"""Largest ratio of seconds to foreseen seconds that is told from larger ones."""

_MARGIN_SPREADS = 1.5
_LARGEST_MARGIN = 0.3
_FIRST_TOKENS = 64
_GROWTH = 4
"""A budget goes at most this many times beyond the prompt tokens ever seen in a step: from few tokens the cost of many
is a guess, and one step tells it."""
_LARGEST_BUDGET = 1 << 30

_ROUNDING = 1e-12
_SHORTEST_S, _LONGEST_S = 1e-7, 1e6
"""Durations that a step can have; a clock that says otherwise is not believed."""

_SOLVE_EVERY = 16
_SOLVE_ALWAYS_BELOW = 16
"""Coefficients are solved for when asked for; errors are judged by ones that are at most a few steps old."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes."""

    prefill_tokens: int
    """Prompt tokens, over all chunks."""
    decode_rows: int
    """Sequences that get one more token."""
    decode_context: int
    """Tokens of KV that those rows read, in all."""
    prefill_pairs: int
    """(query, key) pairs of the chunks' attention: the sum of length * (start + length / 2)."""


@dataclass(slots=True)
class _Kind:
    """How well steps of one kind, with prompts or without, are foreseen."""

    seen: int = 0
    spread: float = 0.1
    """Mean absolute relative error."""
    streak: int = 0
    """Doubted steps in a row; negative: faster than foreseen."""
    mildest: float = 0.0
    """The smallest error of the streak."""
    others_seen: int = 0
    """Steps of the other kind when the streak began."""


class StepCost:
    """The cost of one replica's steps."""

    def __init__(self) -> None:
        # The unknowns are multiples of _USUAL * _unit, so that all are near 1. _information @ unknowns = _evidence.
        self._unit = 0.0
        self._information: list[_Vector] = [(0.0, 0.0, 0.0, 0.0, 0.0)] * 5
        self._evidence: Sequence[float] = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._unknowns: Sequence[float] = (1.0, 1.0, 1.0, 1.0, 1.0)
        self._keep(0.0)
        self._coefficients: _Vector = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._unsolved = 0
        self._with_prompts = _Kind()
        self._without = _Kind()
        self._most_tokens = _FIRST_TOKENS // _GROWTH

    @property
    def ready(self) -> bool:
        """Whether the cost of a prompt token is more than a guess."""
        return self._with_prompts.seen > 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from one step. One that computed nothing, or took no time that a step can take, is passed over."""
        tokens, rows = shape.prefill_tokens, shape.decode_rows
        if not _SHORTEST_S < seconds < _LONGEST_S or not (tokens or rows):
            return
        context, pairs = shape.decode_context, shape.prefill_pairs
        if not self._unit:
            self._begin(shape, seconds)
        c0, c1, c2, c3, c4 = self._coefficients
        foreseen = max(c0 + c1 * tokens + c2 * rows + c3 * context + c4 * pairs, seconds / _FARTHEST)
        # Errors are relative: divided by the seconds foreseen, noise is as large in short steps as in long ones.
        scale = self._unit / foreseen
        features = (
            _USUAL[0] * scale,
            _USUAL[1] * scale * tokens,
            _USUAL[2] * scale * rows,
            _USUAL[3] * scale * context,
            _USUAL[4] * scale * pairs,
        )
        error = seconds / foreseen - 1.0
        weight = 1.0
        if tokens:
            kind = self._with_prompts
            self._most_tokens = max(self._most_tokens, tokens)
            if rows:
                weight = _MIXED_WEIGHT
        else:
            kind = self._without
        kind.seen += 1
        limit = max(_LIMIT_SPREADS * kind.spread, _LEAST_LIMIT)
        if error < 0:
            limit /= 1.0 + limit  # half the time is as far off as twice the time
        size = abs(error)
        if size > limit:
            kind.spread += _SPREAD_RATE * (limit - kind.spread)
            error, trust = self._doubt(kind, features, error, limit)
            weight *= trust
            self._unsolved = _SOLVE_EVERY  # the next such step is judged by what this one taught
        else:
            kind.spread += _SPREAD_RATE * (size - kind.spread)
            # Nearly as far off the same way neither adds to a streak nor ends it: part of it was followed already.
            if kind.streak and (size < limit / 2 or error * kind.streak < 0):
                kind.streak = 0
        self._learn(features, 1.0 + error, weight)
        self._unsolved += 1
        if self._unsolved >= _SOLVE_EVERY or kind.seen < _SOLVE_ALWAYS_BELOW:
            self._solve()

    def predict(self, shape: StepShape) -> float:
        """Seconds that such a step takes in the mean; 0 if no step was ever seen. More work never takes less."""
        if self._unsolved:
            self._solve()
        fixed, token, row, context, pair = self._coefficients
        return (
            fixed
            + token * shape.prefill_tokens
            + row * shape.decode_rows
            + context * shape.decode_context
            + pair * shape.prefill_pairs
        )

    def budget(self, decode_rows: int, decode_context: int, start: int, target_s: float) -> int:
        """Most prompt tokens, of a chunk that starts at position `start`, that may join a step over these rows.

        See `joining`; this is its answer for a step without other chunks.
        """
        return self.joining(StepShape(0, decode_rows, decode_context, 0), start, target_s)

    def joining(self, shape: StepShape, start: int, target_s: float) -> int:
        """Most prompt tokens, of a chunk that starts at position `start`, with which `shape` holds `target_s` seconds.

        0 if there are none, as before any step was seen. Steps scatter: the seconds aimed at are below the target by a
        margin of one and a half mean errors, which about nine steps of ten do not go beyond. Where nothing is known of
        prompts (not `ready`) the answer is a guess, and small.
        """
        foreseen = self.predict(shape)
        if not self._unit:
            return 0
        spread = max(self._with_prompts.spread, self._without.spread)
        room = target_s / (1.0 + min(_MARGIN_SPREADS * spread, _LARGEST_MARGIN)) - foreseen
        if not room > 0:
            return 0
        _, token, _, _, pair = self._coefficients
        # c tokens take token * c + pair * c * (start + c / 2): a quadratic, its root in the form that bears pair = 0.
        linear = token + pair * start
        divisor = linear + math.sqrt(linear * linear + 2.0 * pair * room)
        tokens = 2.0 * room / divisor if 2.0 * room < _LARGEST_BUDGET * divisor else _LARGEST_BUDGET
        return max(0, min(int(tokens), _GROWTH * self._most_tokens - shape.prefill_tokens))

    def _begin(self, shape: StepShape, seconds: float) -> None:
        """Take the usual proportions to be right, and the first step to say how fast the machine is."""
        usual = (
            _USUAL[0]
            + _USUAL[1] * shape.prefill_tokens
            + _USUAL[2] * shape.decode_rows
            + _USUAL[3] * shape.decode_context
            + _USUAL[4] * shape.prefill_pairs
        )
        self._unit = seconds / usual
        self._settle()

    def _doubt(self, kind: _Kind, features: _Vector, error: float, limit: float) -> tuple[float, float]:
        """The error that a step so far from the foreseen counts for, and how much more weight it gets."""
        # The variance of an error is that of a familiar step times 1 + ignorance. Above 1, less is known of such steps
        # than this one tells: it is no accident, and says nothing of the machine.
        direct = _solved(self._information, features, range(5))
        ignorance = sum(a * b for a, b in zip(features, direct, strict=True))
        limit *= math.sqrt(1.0 + ignorance)
        if abs(error) <= limit or ignorance > 1.0:
            kind.streak = 0
            return error, 1.0
        other = self._without if kind is self._with_prompts else self._with_prompts
        direction = 1 if error > 0 else -1
        if kind.streak * direction <= 0:
            kind.streak, kind.mildest, kind.others_seen = 0, error, other.seen
        kind.streak += direction
        if abs(error) < abs(kind.mildest):
            kind.mildest = error
        if -_PATIENCE_FAST < kind.streak < _PATIENCE_SLOW:
            return direction * limit, 1.0
        if other.seen == kind.others_seen or other.streak * direction > 0:
            # All there was to see is off: the machine changed, and with it what was not seen of late.
            self._rescale(1.0 + kind.mildest)
            kind.streak = other.streak = 0
            return (1.0 + error) / (1.0 + kind.mildest) - 1.0, 1.0
        return error, _BELIEVED_WEIGHT

    def _rescale(self, factor: float) -> None:
        """All costs are `factor` times what they were: the unit is. Of their proportions less is known than was."""
        self._solve()
        self._keep(_KEPT_AT_CHANGE)
        self._unit *= factor
        self._settle()

    def _keep(self, share: float) -> None:
        """Keep the unknowns as they are, and a share of what they rest on, but not less than the first guess had."""
        kept = [[value * share for value in row] for row in self._information]
        for i, worth in enumerate(_USUAL_WORTH):
            kept[i][i] += worth
        self._information = [(a, b, c, d, e) for a, b, c, d, e in kept]
        self._evidence = [sum(a * u for a, u in zip(row, self._unknowns, strict=True)) for row in kept]

    def _learn(self, features: _Vector, value: float, weight: float) -> None:
        """Forget along `features`, then add that `features` @ unknowns is `value`."""
        x0, x1, x2, x3, x4 = features
        along = [a * x0 + b * x1 + c * x2 + d * x3 + e * x4 for a, b, c, d, e in self._information]
        y0, y1, y2, y3, y4 = along
        h0, h1, h2, h3, h4 = self._evidence
        known = y0 * x0 + y1 * x1 + y2 * x2 + y3 * x3 + y4 * x4
        forget = _FORGET / known if known > 0 else 0.0
        # The evidence goes with the information, so that forgetting alone moves no coefficient.
        back = forget * (h0 * x0 + h1 * x1 + h2 * x2 + h3 * x3 + h4 * x4)
        gain = weight * value
        self._evidence = (
            h0 - back * y0 + gain * x0,
            h1 - back * y1 + gain * x1,
            h2 - back * y2 + gain * x2,
            h3 - back * y3 + gain * x3,
            h4 - back * y4 + gain * x4,
        )
        self._information = [
            (
                a - (f := forget * y) * y0 + (g := weight * x) * x0,
                b - f * y1 + g * x1,
                c - f * y2 + g * x2,
                d - f * y3 + g * x3,
                e - f * y4 + g * x4,
            )
            for (a, b, c, d, e), y, x in zip(self._information, along, features, strict=True)
        ]

    def _solve(self) -> None:
        """The best coefficients that are not negative: the most negative one is put to 0 until none is left."""
        free = [0, 1, 2, 3, 4]
        unknowns = [0.0] * 5
        while free:
            unknowns = _solved(self._information, self._evidence, free)
            worst = min(free, key=unknowns.__getitem__)
            if unknowns[worst] >= 0:
                break
            free.remove(worst)
        self._unknowns = unknowns
        self._settle()

    def _settle(self) -> None:
        u0, u1, u2, u3, u4 = (usual * self._unit * value for usual, value in zip(_USUAL, self._unknowns, strict=True))
        self._coefficients = (u0, u1, u2, u3, u4)
        self._unsolved = 0


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float], free: Sequence[int]) -> list[float]:
    """The x with matrix @ x = right over the rows and columns `free`, 0 elsewhere. The matrix is positive definite."""
    rows = [[*(matrix[i][j] for j in free), right[i]] for i in free]
    size = len(rows)
    for k, pivot in enumerate(rows):
        # Rounding may leave nothing of a direction that is all but unknown; this much keeps pivots above it.
        pivot[k] *= 1.0 + _ROUNDING
    for k, pivot in enumerate(rows):
        if pivot[k] <= 0:
            continue
        head = 1.0 / pivot[k]
        for row in rows[k + 1 :]:
            factor = row[k] * head
            for j in range(k + 1, size + 1):
                row[j] -= factor * pivot[j]
    solution = [0.0] * 5
    for k in range(size - 1, -1, -1):
        row = rows[k]
        rest = row[size]
        for j in range(k + 1, size):
            rest -= row[j] * solution[free[j]]
        solution[free[k]] = rest / row[k] if row[k] > 0 else 0.0
    return solution
