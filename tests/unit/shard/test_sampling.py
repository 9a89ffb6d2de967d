"""The stages of the sampler against their formulas, written out row by row."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from text_generation_proto.values import Sampling
from text_generation_shard.engines.torch.sampling.penalties import SamplingRow
from text_generation_shard.engines.torch.sampling.sampler import SampledTensors, sample, top_candidates, uniforms

VOCABULARY = 6000
"""More tokens than the sampler sorts in its first two attempts."""


def make_row(sampling: Sampling, history: list[int] | None = None, position: int | None = None) -> SamplingRow:
    history = history or [1, 2, 3]
    position = len(history) if position is None else position
    return SamplingRow(sampling, position, history[-1], torch.tensor(history), generated=len(history) // 2)


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


def processed(logits: Tensor, sampling: Sampling, history: list[int] | None = None) -> Tensor:
    """Return the processed scores of a single row."""
    return sample(logits.clone(), [make_row(sampling, history)]).scores[0]


def kept(logits: Tensor, sampling: Sampling) -> set[int]:
    return set(processed(logits, sampling).isfinite().nonzero().squeeze(1).tolist())


def test_greedy_takes_the_largest_logit_and_reports_its_log_softmax() -> None:
    logits = some_logits(5)
    sampled = read(sample(logits.clone(), [make_row(Sampling())] * 5))
    assert sampled.token_ids == logits.argmax(-1).tolist()
    assert sampled.logprobs == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-5)


@pytest.mark.parametrize("k", [1, 2, 40, 300, VOCABULARY, VOCABULARY + 5])
def test_top_k_keeps_k(k: int) -> None:
    logits = some_logits()
    expected = set(logits[0].argsort(descending=True)[:k].tolist())
    assert kept(logits, Sampling(top_k=k)) == expected


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 10.0], ids=["flat", "broad", "narrow", "peaked"])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999])
def test_top_p_drops_the_tail_whose_mass_is_at_most_one_minus_p(p: float, scale: float) -> None:
    logits = some_logits(scale=scale)
    ascending, order = logits[0].double().softmax(-1).sort()
    dropped = set(order[ascending.cumsum(0) <= 1 - p].tolist()) - {int(order[-1])}
    assert len(kept(logits, Sampling(top_p=p)) ^ (set(range(VOCABULARY)) - dropped)) <= 1  # rounding at the edge


@pytest.mark.parametrize("p", [1e-6, 0.2, 0.9])
def test_typical_p_keeps_the_tokens_nearest_to_the_entropy(p: float) -> None:
    logits = some_logits()
    logprobs = logits[0].double().log_softmax(-1)
    deviations = (-logprobs + (logprobs.exp() * logprobs).sum()).abs()
    ascending, order = deviations.sort()
    last = int((logprobs.exp()[order].cumsum(0) < p).sum())
    expected = set((deviations <= ascending[last]).nonzero().squeeze(1).tolist())
    assert len(kept(logits, Sampling(typical_p=p)) ^ expected) <= 1


def test_stages_run_in_order() -> None:
    """Temperature, top-k, top-p: top-p counts the mass of the distribution after the other two."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    # Halved and cut to three: probabilities 0.51, 0.31, 0.19.
    assert kept(logits, Sampling(temperature=2.0, top_k=3, top_p=0.8)) == {0, 1}
    assert kept(logits, Sampling(temperature=2.0, top_p=0.8)) == {0, 1, 2}


def test_repetition_penalty_applies_once_to_each_token_seen() -> None:
    logits = torch.tensor([[2.0, -2.0, 3.0, 1.0]])
    scores = processed(logits, Sampling(repetition_penalty=2.0), [0, 1, 1, 0, 0])
    assert scores.tolist() == [1.0, -4.0, 3.0, 1.0]


def test_frequency_penalty_counts_over_the_rows_own_length() -> None:
    logits = torch.zeros(1, 5)
    scores = processed(logits, Sampling(frequency_penalty=0.5), [3, 3, 1, 3])
    assert scores.tolist() == pytest.approx([0.0, -0.5 / 4, 0.0, -0.5 * 3 / 4, 0.0])


def test_penalties_of_rows_with_histories_of_different_length() -> None:
    logits = some_logits(3)
    sampling = Sampling(repetition_penalty=1.5, frequency_penalty=-1.0)
    histories = [[5], [7, 8, 9, 9], [4, 4]]
    together = sample(logits.clone(), [make_row(sampling, history) for history in histories]).scores
    for index, history in enumerate(histories):
        assert torch.equal(together[index], processed(logits[index : index + 1], sampling, history))
        assert together[index, 0] == logits[index, 0]


def test_the_watermark_favours_half_the_vocabulary_by_the_last_token() -> None:
    logits = some_logits()
    sampling = Sampling(watermark=True)
    scores = processed(logits, sampling, [1, 2, 77])
    generator = torch.Generator().manual_seed(15485863 * 77)
    green = torch.randperm(VOCABULARY, generator=generator)[: VOCABULARY // 2]
    expected = logits[0].clone()
    expected[green] += 2.0
    assert torch.equal(scores, expected)
    assert torch.equal(scores, processed(logits, sampling, [77]))
    assert not torch.equal(scores, processed(logits, sampling, [77, 1]))


def reference(scores: list[float], sampling: Sampling, generated: list[int]) -> list[float]:
    """The OpenAI stages written out for one row: output penalties, bias, min_p after temperature."""
    counts = Counter(generated)
    scores = [
        score - counts[token] * sampling.output_frequency_penalty - (token in counts) * sampling.output_presence_penalty
        for token, score in enumerate(scores)
    ]
    for token, value in zip(sampling.logit_bias_ids, sampling.logit_bias_values, strict=True):
        scores[token] += value
    scores = [score / sampling.temperature for score in scores]
    if sampling.min_p:
        best = max(scores)
        scores = [score if math.exp(score - best) >= sampling.min_p else -math.inf for score in scores]
    return scores


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_openai_stages_follow_their_formulas_in_every_row(data: st.DataObject) -> None:
    vocabulary, rows, expected = 40, [], []
    count = data.draw(st.integers(1, 5))
    logits = some_logits(count, vocabulary, seed=data.draw(st.integers(0, 99)))
    tokens = st.integers(0, vocabulary - 1)
    for index in range(count):
        history = data.draw(st.lists(tokens, min_size=1, max_size=12))
        generated = data.draw(st.integers(0, len(history) - 1))
        bias = data.draw(st.lists(st.tuples(tokens, st.sampled_from([-100.0, -1.5, 0.25, 100.0])), max_size=4))
        sampling = Sampling(
            temperature=data.draw(st.sampled_from([1.0, 0.5])),
            min_p=data.draw(st.sampled_from([0.0, 0.1, 0.9, 1.0])),
            output_frequency_penalty=data.draw(st.sampled_from([0.0, 0.5, -2.0])),
            output_presence_penalty=data.draw(st.sampled_from([0.0, 1.25, -0.5])),
            logit_bias_ids=tuple(token for token, _ in bias),
            logit_bias_values=tuple(value for _, value in bias),
        )
        rows.append(SamplingRow(sampling, len(history), history[-1], torch.tensor(history), generated))
        generated_tokens = history[len(history) - generated :]
        expected.append(reference(logits[index].tolist(), sampling, generated_tokens))
    scores = sample(logits, rows).scores
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-4, rtol=1e-5)


def test_suppressed_tokens_have_no_probability_in_their_own_row_only() -> None:
    logits = torch.tensor([[1.0, 9.0, 8.0]] * 2)
    suppressed = SamplingRow(Sampling(), 1, 0, suppressed=frozenset({1, 2, 77}))
    sampled = sample(logits, [suppressed, SamplingRow(Sampling(), 1, 0)])
    assert read(sampled).token_ids == [0, 1]
    assert read(sampled).logprobs[0] == 0.0
    assert top(sampled, 0, 3)[0] == (0,)


def test_the_grammar_mask_comes_before_temperature_and_filters() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 8.0]] * 2)
    allowed = torch.tensor([False, True, True, False])
    masked = SamplingRow(Sampling(top_k=1), 1, 0, allowed=allowed)
    sampled = read(sample(logits, [SamplingRow(Sampling(), 1, 0), masked]))
    assert sampled.token_ids == [0, 2]
    assert sampled.logprobs[1] == 0.0
    alone = read(sample(logits[:1], [masked]))
    assert (alone.token_ids, alone.logprobs) == ([2], [0.0])


@pytest.mark.parametrize(("p", "left"), [(1.0, {0, 1}), (0.5, {0, 1, 2}), (0.2, {0, 1, 2, 3})])
def test_min_p_is_relative_to_the_most_probable_and_keeps_ties(p: float, left: set[int]) -> None:
    logits = torch.tensor([[1.0, 1.0, 0.55, 0.25]]).log()
    assert kept(logits, Sampling(min_p=p)) == left


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
    min_p=st.sampled_from([0.0, 0.05]),
    output_frequency_penalty=st.sampled_from([0.0, 0.5]),
    output_presence_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias_ids=st.just((3, 4)),
    logit_bias_values=st.sampled_from([(0.0, 1.0), (2.0, -3.0)]),
)


@settings(max_examples=40, deadline=None)
@given(samplings=st.lists(STAGES, min_size=2, max_size=6), data=st.data())
def test_a_row_samples_the_same_token_in_any_batch(samplings: list[Sampling], data: st.DataObject) -> None:
    logits = some_logits(len(samplings), vocabulary=1500)
    histories = [data.draw(st.lists(st.integers(0, 1499), min_size=1, max_size=9)) for _ in samplings]
    rows = [make_row(sampling, history) for sampling, history in zip(samplings, histories, strict=True)]
    together = read(sample(logits.clone(), rows))
    for index, row in enumerate(rows):
        alone = read(sample(logits[index : index + 1].clone(), [row]))
        assert alone.token_ids == [together.token_ids[index]]
        assert alone.logprobs == pytest.approx([together.logprobs[index]], abs=1e-5)
        assert math.isfinite(alone.logprobs[0])


def draws(logits: Tensor, sampling: Sampling, count: int) -> list[int]:
    rows = [make_row(sampling, position=position) for position in range(count)]
    return read(sample(logits.expand(count, -1).clone(), rows)).token_ids


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])
    count = 20_000
    counts = Counter(draws(logits, Sampling(greedy=False, seed=3), count))
    for token, probability in enumerate(logits.softmax(-1)[0].tolist()):
        spread = math.sqrt(count * probability * (1 - probability))
        assert abs(counts[token] - count * probability) <= 4 * spread


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    pairs = [(seed, position) for seed in (0, 1, 2, (1 << 64) - 1) for position in range(200)]
    numbers = uniforms([make_row(Sampling(greedy=False, seed=seed), position=position) for seed, position in pairs])
    assert numbers == [(splitmix64(splitmix64(seed) ^ position) >> 11) * 2.0**-53 for seed, position in pairs]
    assert len(set(numbers)) == 800
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / 800 == pytest.approx(0.5, abs=0.05)


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
