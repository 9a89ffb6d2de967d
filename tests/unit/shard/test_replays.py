"""Replays: generated tokens are scored as they were chosen, in the chunks of a prompt."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from engine_driver import Driver, Stream
from tiny_engines import tiny_engine

from text_generation_proto.values import LogprobOptions, Sampling, Stopping, WarmUpLimits
from text_generation_shard.engine import Engine, NewSequence, TokenScores
from text_generation_shard.sequence_checks import sequence_problem

PROMPT = tuple(range(7, 47))
SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(greedy=False, seed=7, temperature=0.8),
    "cut": Sampling(greedy=False, seed=9, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.95),
    "penalized": Sampling(repetition_penalty=1.3, frequency_penalty=0.4, output_frequency_penalty=0.3),
    "presence": Sampling(greedy=False, seed=11, output_presence_penalty=0.9, watermark=True),
    "limited": Sampling(logit_bias_ids=(5, 6), logit_bias_values=(2.0, -1.0), allowed_token_ids=tuple(range(5, 90))),
    "banned": Sampling(greedy=False, seed=3, bad_words=((20,), (21, 22), tuple(range(30, 33)))),
}


@pytest.fixture(scope="module", params=["echo", "torch"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=2048)))


def again(driver: Driver, served: Stream, *, chunk: int = 1 << 30, tokens: list[int] | None = None) -> TokenScores:
    tokens = served.tokens if tokens is None else tokens
    stopping = Stopping(1, min_new_tokens=served.stopping.min_new_tokens, eos_token_ids=served.stopping.eos_token_ids)
    stream = driver.admit(
        [*served.prompt, *tokens],
        chunk=chunk,
        sampling=served.sampling,
        stopping=stopping,
        generated_tokens=len(tokens),
        replayed=True,
    )
    (scores,) = (scores for result in iter(driver.step, None) for scores in result.generated_scores)
    assert stream.finish is not None
    assert scores.slot == stream.slot
    return scores


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_replay_has_the_scores_that_were_served(driver: Driver, sampling: Sampling) -> None:
    served = driver.admit(PROMPT, 90, sampling=sampling)
    driver.run()
    for chunk in (1 << 30, 29):
        scores = again(driver, served, chunk=chunk)
        assert scores.drawn_ids == served.tokens
        assert scores.logprobs == pytest.approx(served.logprobs, abs=1e-5)
        assert scores.drawn_logprobs == pytest.approx(served.logprobs, abs=1e-5)


def test_a_replay_ends_no_text_before_min_new_tokens(driver: Driver) -> None:
    stopping = Stopping(12, eos_token_ids=frozenset(range(8, 290)), min_new_tokens=10)
    served = driver.admit(PROMPT, stopping=stopping)
    driver.run()
    assert again(driver, served).drawn_ids == served.tokens


def test_another_token_is_noticed_where_it_was_served(driver: Driver) -> None:
    served = driver.admit(PROMPT, 20)
    driver.run()
    wrong = [*served.tokens[:10], 3, *served.tokens[11:]]
    scores = again(driver, served, tokens=wrong)
    assert scores.drawn_ids[:11] == served.tokens[:11]
    assert scores.logprobs[:10] == pytest.approx(served.logprobs[:10], abs=1e-5)
    assert scores.logprobs[10] < scores.drawn_logprobs[10]


def test_a_forbidden_token_has_no_probability(driver: Driver) -> None:
    if driver.engine.info.engine == "echo":
        pytest.skip("echo knows no bad words")
    served = driver.admit(PROMPT, 5, sampling=Sampling(bad_words=((20,),)))
    driver.run()
    assert again(driver, served, tokens=[20, 21]).logprobs[0] == -math.inf


def test_a_replay_is_refused_by_an_engine_that_cannot_score(driver: Driver) -> None:
    order = NewSequence(0, PROMPT, Stopping(1), generated_tokens=3, logprobs=LogprobOptions(generated=True))
    assert sequence_problem(order, driver.engine.info) is None
    problem = "computed_tokens must leave the generated tokens of a replay to score"
    assert sequence_problem(replace(order, blocks=(1, 2, 3), computed_tokens=37), driver.engine.info) == problem
    assert sequence_problem(replace(order, blocks=(1, 2, 3), computed_tokens=36), driver.engine.info) is None
    info = replace(driver.engine.info, scores_generated=False)
    assert sequence_problem(order, info) == "the engine does not score generated tokens"
