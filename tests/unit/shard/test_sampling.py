"""The sampler against its formulas, written out row by row."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from text_generation_proto.values import Sampling
from text_generation_shard.engines.torch.sampling.penalties import SamplingRow
from text_generation_shard.engines.torch.sampling.sampler import (
    SEGMENT,
    SampledTensors,
    draw_keys,
    sample,
    top_candidates,
)

VOCABULARY = 6000
"""More tokens than the sampler sorts in its first two attempts."""


def make_row(sampling: Sampling, position: int = 3) -> SamplingRow:
    return SamplingRow(sampling, position, 3, torch.tensor([1, 2, 3]), generated=1)


class Read(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    valid: list[bool]


def read(sampled: SampledTensors) -> Read:
    return Read(sampled.token_ids.tolist(), sampled.logprobs.tolist(), sampled.logprobs.isfinite().tolist())


def top(sampled: SampledTensors, row: int, n: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return top_candidates(sampled, [row], n).top(0, n)


def some_logits(rows: int = 1, vocabulary: int = VOCABULARY, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def reference(logits: Tensor, row: SamplingRow) -> Tensor:
    """Return the processed scores [vocabulary] of one row in float64, stage by stage."""
    assert row.history is not None
    sampling, history, scores = row.sampling, row.history.tolist(), logits.double()
    if sampling.watermark:
        generator = torch.Generator().manual_seed(15485863 * row.last_token)
        scores[torch.randperm(len(scores), generator=generator)[: len(scores) // 2]] += 2.0
    for token in set(history):
        scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
    for token, count in Counter(history).items():
        scores[token] -= sampling.frequency_penalty * count / len(history)
    for token, count in Counter(history[len(history) - row.generated :]).items():
        scores[token] -= sampling.output_frequency_penalty * count + sampling.output_presence_penalty
    for token, value in zip(sampling.logit_bias_ids, sampling.logit_bias_values, strict=True):
        scores[token] += value
    scores[[token for token in row.suppressed if token < len(scores)]] = -torch.inf
    if row.allowed is not None:
        scores[~row.allowed] = -torch.inf
    scores /= sampling.temperature
    if sampling.top_k:
        scores[scores < scores.topk(min(sampling.top_k, len(scores))).values[-1]] = -torch.inf
    if sampling.top_p < 1:
        keep_smallest_set(scores, scores.clone(), sampling.top_p)
    if sampling.min_p:
        scores[scores < scores.max() + math.log(sampling.min_p)] = -torch.inf
    if sampling.typical_p < 1:
        logprobs = scores.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).nansum()
        keep_smallest_set(scores, -(-logprobs - entropy).abs(), sampling.typical_p)
    return scores


def keep_smallest_set(scores: Tensor, keys: Tensor, mass: float) -> None:
    """Keep the smallest set of tokens with the largest keys whose probabilities reach `mass`, at least one."""
    ordered, order = keys.sort(descending=True)
    masses = scores.softmax(-1)[order].cumsum(0)
    scores[keys < ordered[min(int((masses < mass).sum()), len(scores) - 1)]] = -torch.inf


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 10.0], ids=["flat", "broad", "narrow", "peaked"])
@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(top_k=k) for k in (1, 2, 40, 300, VOCABULARY, VOCABULARY + 5)),
        *(Sampling(top_p=p) for p in (1e-6, 0.3, 0.9, 0.999)),
        *(Sampling(typical_p=p) for p in (1e-6, 0.2, 0.9)),
    ],
    ids=lambda sampling: f"{sampling.top_k}-{sampling.top_p}-{sampling.typical_p}",
)
def test_filters_of_a_large_vocabulary(sampling: Sampling, scale: float) -> None:
    logits = some_logits(scale=scale)
    row = make_row(sampling)
    kept, expected = (scores.isfinite() for scores in (sample(logits, [row]).scores[0], reference(logits[0], row)))
    assert (kept != expected).sum() <= 2 * (sampling.top_k == 0)  # rounding at the edge


def sampling_rows(vocabulary: int) -> st.SearchStrategy[SamplingRow]:
    tokens = st.integers(0, vocabulary - 1)
    bias = st.lists(st.tuples(tokens, st.sampled_from([-100.0, -1.5, 0.25, 100.0])), max_size=4)

    @st.composite
    def row(draw: st.DrawFn) -> SamplingRow:
        sampling, biases = draw(STAGES), draw(bias)
        if draw(st.booleans()):  # otherwise few scores are left to compare
            sampling = replace(sampling, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
        sampling = replace(
            sampling, logit_bias_ids=tuple(t for t, _ in biases), logit_bias_values=tuple(v for _, v in biases)
        )
        history = draw(st.lists(tokens, min_size=1, max_size=12))
        allowed = draw(st.none() | st.just(torch.arange(vocabulary) % 3 < 2))
        suppressed = draw(st.sampled_from([frozenset[int](), frozenset({1, 2, vocabulary + 77})]))
        generated = draw(st.integers(0, len(history) - 1))
        return SamplingRow(sampling, len(history), history[-1], torch.tensor(history), generated, suppressed, allowed)

    return row()


STAGES = st.builds(
    Sampling,
    greedy=st.booleans(),
    temperature=st.sampled_from([1.0, 0.5, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    typical_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    seed=st.integers(0, (1 << 64) - 1),
    watermark=st.booleans(),
    min_p=st.sampled_from([0.0, 0.05, 0.9, 1.0]),
    output_frequency_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    output_presence_penalty=st.sampled_from([0.0, 1.25, -0.5]),
)


@given(data=st.data(), vocabulary=st.sampled_from([40, 1500]))
def test_every_row_has_the_scores_and_the_token_of_the_formulas(data: st.DataObject, vocabulary: int) -> None:
    rows = data.draw(st.lists(sampling_rows(vocabulary), min_size=1, max_size=5))
    logits = some_logits(len(rows), vocabulary, seed=data.draw(st.integers(0, 99)))
    before = logits.clone()
    sampled = sample(logits, rows)
    assert torch.equal(logits, before)
    for row, row_logits, scores, token, logprob, key in zip(
        rows, logits, sampled.scores, *read(sampled)[:2], draw_keys(rows), strict=True
    ):
        expected = reference(row_logits, row)
        torch.testing.assert_close(scores.double(), expected, atol=1e-4, rtol=1e-5)
        assert logprob == pytest.approx(float(expected.log_softmax(-1)[token]), abs=1e-4)
        if row.sampling.greedy:
            assert token == int(expected.argmax())
        else:
            assert first_of_race(expected.softmax(-1), int(key)) == token
            assert expected[token].isfinite()


@pytest.mark.parametrize("step", [1, 2], ids=["all rows", "every other row"])
def test_more_rows_than_a_stage_computes_at_once(step: int) -> None:
    samplings = [Sampling(greedy=False, temperature=0.5 + row / 40, top_p=0.9, seed=row) for row in range(70)]
    rows = [make_row(each if row % step == 0 else Sampling()) for row, each in enumerate(samplings)]
    logits = some_logits(len(rows), 300)
    together = sample(logits, rows)
    for number, row in enumerate(rows):
        alone = sample(logits[number : number + 1], [row])
        assert together.token_ids[number] == alone.token_ids[0]
        assert torch.equal(together.scores[number], alone.scores[0])


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def first_of_race(probabilities: torch.Tensor, key: int) -> int:
    """Return the token that arrives first: of the segments the first one, then of its tokens."""
    parts = probabilities.tolist() + [0.0] * (-len(probabilities) % SEGMENT)
    segments = [parts[at : at + SEGMENT] for at in range(0, len(parts), SEGMENT)]
    times = iter([-math.log(uniform(key, number)) for number in range(len(segments) + SEGMENT)])
    first = min(range(len(segments)), key=[next(times) / (sum(each) or 1e-300) for each in segments].__getitem__)
    arrivals = [time / (p or 1e-300) for time, p in zip(times, segments[first], strict=True)]
    return first * SEGMENT + min(range(SEGMENT), key=arrivals.__getitem__)


def uniform(key: int, number: int) -> float:
    """Return an output of splitmix64, with arithmetic shifts, as a number in (0, 1)."""
    x = (key + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        sign = (1 << 64) - (1 << (64 - shift)) if x >> 63 else 0
        x = ((x ^ (x >> shift | sign)) * factor) & 0xFFFFFFFFFFFFFFFF
    return ((x >> 11) + 0.5) * 2.0**-52


def test_a_draw_depends_on_seed_and_position_only() -> None:
    pairs = [(seed, position) for seed in (0, 1, 2, (1 << 64) - 1) for position in range(200)]
    keys = draw_keys([make_row(Sampling(greedy=False, seed=seed), position) for seed, position in pairs])
    assert keys == [splitmix64(splitmix64(seed) ^ position) >> 11 for seed, position in pairs]
    assert len(set(keys)) == 800


def test_draws_have_the_probabilities_of_their_tokens() -> None:
    count, vocabulary = 20_000, SEGMENT + 500
    rows = [make_row(Sampling(greedy=False, seed=seed), seed) for seed in range(count // 100)]
    logits = some_logits(1, vocabulary)
    counts = torch.zeros(vocabulary)
    for position in range(100):
        placed = [replace(row, position=position) for row in rows]
        counts += sample(logits.expand(len(rows), -1), placed).token_ids.bincount(minlength=vocabulary)
    expected = logits[0].softmax(-1) * count
    often = expected > 10
    assert often.sum() > 50
    groups, wanted = counts[often], expected[often]
    groups, wanted = (torch.cat([some, (count - some.sum())[None]]) for some in (groups, wanted))
    chi_squared = float(((groups - wanted) ** 2 / wanted).sum())
    freedom = len(groups) - 1
    assert abs(chi_squared - freedom) < 4 * math.sqrt(2 * freedom)


def test_rounding_errors_change_no_draw() -> None:
    rows = [make_row(Sampling(greedy=False, seed=seed), 7) for seed in range(2000)]
    logits = some_logits(1, 5000).expand(2000, -1)
    torch.manual_seed(0)
    other = logits + torch.randn(logits.shape) * 1e-3
    changed = sample(logits, rows).token_ids != sample(other, rows).token_ids
    assert changed.sum() <= 10  # 97 with inverse transform sampling


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(
    "bad", [[math.nan, 1.0, 2.0], [-math.inf] * 3, [math.inf, 0.0, 0.0]], ids=["nan", "none", "inf"]
)
def test_a_row_without_a_choice_does_not_affect_the_others(bad: list[float], greedy: bool) -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], bad, [7.0, 1.0, 0.0]])
    rows = [make_row(Sampling()), make_row(Sampling(greedy=greedy, top_p=0.9)), make_row(Sampling())]
    sampled = read(sample(logits, rows))
    assert sampled.valid == [True, False, True]
    assert (sampled.token_ids[0], sampled.token_ids[2]) == (1, 0)


@pytest.mark.parametrize(
    ("logits", "sampling", "n", "expected"),
    [
        ([1.0, 4.0, 2.0, 3.0], Sampling(temperature=0.5), 3, (1, 3, 2)),
        ([1.0, 5.0, 1.0, 0.0, 1.0], Sampling(), 2, (1, 0, 2, 4)),
        ([1.0, 5.0, 3.0, 0.0], Sampling(top_k=2), 4, (1, 2)),
        ([3.0, 1.0, 2.0, 1.0, 0.0], Sampling(top_k=3), 3, (0, 2, 1, 3)),
        ([0.0] * VOCABULARY, Sampling(), 3, tuple(range(VOCABULARY))),
    ],
    ids=["sorted", "ties with the last", "filtered", "top-k keeps ties", "only ties"],
)
def test_top_tokens(logits: list[float], sampling: Sampling, n: int, expected: tuple[int, ...]) -> None:
    ids, logprobs = top(sample(torch.tensor([logits]), [make_row(sampling)]), 0, n)
    assert ids == expected
    processed = torch.tensor(logits) / sampling.temperature
    if sampling.top_k:
        processed[[token not in expected for token in range(len(logits))]] = -torch.inf
    assert logprobs == pytest.approx(processed.log_softmax(-1)[list(expected)].tolist(), abs=1e-6)


def test_top_tokens_of_some_rows_each_with_its_own_n() -> None:
    logits = some_logits(4)
    sampled = sample(logits, [make_row(Sampling())] * 4)
    candidates = top_candidates(sampled, [1, 3], 7)
    for index, row, n in [(0, 1, 7), (1, 3, 2)]:
        expected = logits[row].log_softmax(-1).topk(n)
        ids, logprobs = candidates.top(index, n)
        assert list(ids) == expected.indices.tolist()
        assert logprobs == pytest.approx(expected.values.tolist(), abs=1e-5)
