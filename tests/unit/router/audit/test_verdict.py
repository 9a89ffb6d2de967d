"""The verdict of an audit."""

from __future__ import annotations

from math import inf, nan

import pytest

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import Sampling
from text_generation_router.audit.verdict import (
    EXACT,
    RECURRENT,
    ROUNDED,
    Bounds,
    Judgement,
    Verdict,
    judge,
)

TOKENS = list(range(100, 120))
SERVED = [-0.5] * 20
DRAWS = Sampling(greedy=False, seed=1)
CUTS = Sampling(greedy=False, seed=1, top_p=0.9)


def verdict(
    bounds: Bounds,
    sampling: Sampling = Sampling(),
    *,
    served: dict[int, float] | None = None,
    replayed: dict[int, float] | None = None,
    drawn: dict[int, tuple[int, float]] | None = None,
) -> Judgement:
    """Judge TOKENS that agree, but for the values given by position."""
    logprobs = [(served or {}).get(at, -0.5) for at in range(20)]
    again = [(replayed or {}).get(at, -0.5) for at in range(20)]
    ids, best = list(TOKENS), list(again)
    for at, (token, logprob) in (drawn or {}).items():
        ids[at], best[at] = token, logprob
    scores = pb.TokenScores(logprobs=again, drawn_ids=ids, drawn_logprobs=best)
    return judge(TOKENS, logprobs, scores, sampling, bounds)


@pytest.mark.parametrize("bounds", [EXACT, ROUNDED])
@pytest.mark.parametrize("sampling", [Sampling(), DRAWS, CUTS])
def test_equal_scores_are_the_same_text(bounds: Bounds, sampling: Sampling) -> None:
    assert verdict(bounds, sampling) == Judgement(Verdict.SAME)


def test_a_log_probability_beyond_the_bound_is_another_text() -> None:
    assert verdict(EXACT, replayed={7: -0.5002}) == Judgement(
        Verdict.DIFFERENT, 7, 107, 107, pytest.approx(-0.0002, abs=1e-6)
    )
    assert verdict(ROUNDED, replayed=dict.fromkeys(range(4), -0.9)).verdict is Verdict.SAME


def test_one_token_and_a_share_of_a_long_text_may_be_beyond_the_bound_where_numbers_are_rounded() -> None:
    assert verdict(ROUNDED, replayed={7: -1.5}).verdict is Verdict.SAME
    assert verdict(ROUNDED, replayed={7: -1.5, 9: -1.5}).position == 7
    assert verdict(ROUNDED, DRAWS, replayed={7: -inf, 9: -1.5}).difference == -inf


def test_a_greedy_token_may_be_another_one_only_among_equals() -> None:
    assert verdict(EXACT, drawn={3: (9, -0.49995)}).verdict is Verdict.SAME
    assert verdict(EXACT, drawn={3: (9, -0.49)}) == Judgement(Verdict.DIFFERENT, 3, 103, 9, pytest.approx(0.01))
    assert verdict(ROUNDED, drawn=dict.fromkeys(range(5), (9, -0.1))).verdict is Verdict.SAME
    assert verdict(ROUNDED, drawn=dict.fromkeys(range(5), (9, 0.1))).verdict is Verdict.DIFFERENT


def test_without_served_log_probabilities_greedy_tokens_are_judged_by_the_best() -> None:
    unknown = dict.fromkeys(range(20), nan)
    assert verdict(EXACT, served=unknown).verdict is Verdict.SAME
    assert verdict(EXACT, served=unknown, drawn={0: (9, -0.1)}).verdict is Verdict.DIFFERENT


def test_a_token_that_may_not_be_chosen_is_another_text_without_its_served_log_probability() -> None:
    assert verdict(EXACT, DRAWS, served={4: nan}, replayed={4: -inf}).position == 4
    assert verdict(EXACT, DRAWS, served={4: nan}, replayed={4: -3.0}).verdict is Verdict.SAME


def test_unknown_log_probabilities_hide_no_drift() -> None:
    unknown, drift = dict.fromkeys(range(10), nan), dict.fromkeys(range(10, 20), -0.45)
    assert verdict(ROUNDED, DRAWS, served=unknown, replayed=drift).verdict is Verdict.SAME
    drift = dict.fromkeys(range(10, 20), -0.35)
    assert verdict(ROUNDED, DRAWS, served=unknown, replayed=drift).verdict is Verdict.DIFFERENT


def test_a_few_draws_may_turn_on_less_than_the_bound_and_any_where_numbers_are_rounded() -> None:
    assert verdict(EXACT, DRAWS, drawn=dict.fromkeys(range(3), (9, -0.7))).verdict is Verdict.SAME
    assert verdict(EXACT, DRAWS, drawn=dict.fromkeys(range(4), (9, -0.7))).verdict is Verdict.DIFFERENT
    assert verdict(ROUNDED, DRAWS, drawn=dict.fromkeys(range(20), (9, -0.7))).verdict is Verdict.SAME


@pytest.mark.parametrize(("bounds", "most"), [(EXACT, 3), (ROUNDED, 6)])
def test_a_few_tokens_may_be_cut_off_otherwise(bounds: Bounds, most: int) -> None:
    assert verdict(bounds, CUTS, replayed=dict.fromkeys(range(most), -inf)).verdict is Verdict.SAME
    assert verdict(bounds, CUTS, replayed=dict.fromkeys(range(most + 1), -inf)).verdict is Verdict.DIFFERENT


def test_a_drift_that_no_single_token_shows_is_another_text() -> None:
    drift = verdict(ROUNDED, replayed=dict.fromkeys(range(20), -0.38))
    assert (drift.verdict, drift.position) == (Verdict.DIFFERENT, 19)
    assert drift.difference == pytest.approx(0.12)
    assert verdict(ROUNDED, replayed={at: -0.5 + 0.12 * (-1) ** at for at in range(20)}).verdict is Verdict.SAME
    assert verdict(ROUNDED, replayed=dict.fromkeys(range(6), -0.38)).verdict is Verdict.SAME


def test_one_token_of_a_recurrent_model_may_be_as_far_off_as_float32_is() -> None:
    assert verdict(RECURRENT, replayed={3: -0.501}).verdict is Verdict.SAME
    assert verdict(EXACT, replayed={3: -0.501}).verdict is Verdict.DIFFERENT
    assert verdict(RECURRENT, replayed={3: -0.506}).verdict is Verdict.DIFFERENT


def test_tokens_without_a_score_are_not_judged() -> None:
    assert verdict(EXACT, replayed={4: nan}, drawn={4: (0, nan)}).verdict is Verdict.SAME
    assert verdict(EXACT, replayed=dict.fromkeys(range(20), nan)).verdict is Verdict.UNJUDGED


def test_the_last_token_may_have_no_score() -> None:
    scores = pb.TokenScores(logprobs=SERVED[:19], drawn_ids=TOKENS[:19], drawn_logprobs=SERVED[:19])
    assert judge(TOKENS, SERVED, scores, DRAWS, EXACT).verdict is Verdict.SAME


def test_bounds_follow_the_data_type() -> None:
    def bounds(dtype: str, engine: str = "torch", cache: str = "", *, has_states: bool = False) -> Bounds:
        info = pb.InfoResponse(engine=engine, dtype=dtype, kv_cache_dtype=cache)
        return Bounds.of(info, has_states=has_states)

    assert [bounds(dtype) for dtype in ("float32", "bfloat16", "float16")] == [EXACT, ROUNDED, ROUNDED]
    assert bounds("float32", has_states=True) == RECURRENT
    assert bounds("bfloat16", "echo") == EXACT
    assert bounds("float32", cache="fp8_e4m3fn") == ROUNDED


@pytest.mark.parametrize(
    ("replayed", "token"),
    [([-0.5, -0.501], 0.25), ([-0.55, -0.5], 0.4), ([-0.9, -0.5], 3.2), ([-5.0, -0.5], 4.0), ([nan, nan], 0.5)],
)
def test_bounds_are_a_multiple_of_the_difference_measured(replayed: list[float], token: float) -> None:
    assert Bounds.measured([-0.5, -0.5], replayed).token == pytest.approx(token)
