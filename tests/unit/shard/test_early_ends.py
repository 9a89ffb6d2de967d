"""min_new_tokens, OpenAI's penalties and prompt top tokens on both step-scheduled engines."""

from __future__ import annotations

import math

import pytest
from engine_driver import Driver
from tiny_engines import tiny_engine

from text_generation_proto.values import FinishReason, Sampling, Stopping, WarmUpLimits
from text_generation_shard.engine import Engine

PROMPT = tuple(range(7, 47))
ENDS = frozenset(range(10, 59))
SAMPLED = Sampling(greedy=False, temperature=2.0, seed=3)


@pytest.fixture(scope="module", params=["echo", "torch"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(request.param, tmp_path_factory.mktemp("model"), vocab_size=60)


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=2048)))


@pytest.mark.parametrize("kind", ["eos", "stop"])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_no_sequence_ends_before_min_new_tokens(driver: Driver, sampling: Sampling, kind: str) -> None:
    ends = (ENDS, frozenset[int]()) if kind == "eos" else (frozenset[int](), ENDS)
    early = driver.admit(PROMPT, sampling=sampling, stopping=Stopping(40, *ends))
    late = driver.admit(PROMPT, sampling=sampling, stopping=Stopping(40, *ends, min_new_tokens=12))
    driver.run()
    assert len(early.tokens) < 12
    assert len(late.tokens) > 12
    assert late.finish is (FinishReason.EOS_TOKEN if kind == "eos" else FinishReason.STOP_SEQUENCE)
    if driver.engine.info.engine == "torch":
        assert not set(late.tokens[:12]) & ENDS


def test_output_penalties_survive_a_preemption(driver: Driver) -> None:
    sampling = Sampling(greedy=False, seed=9, output_frequency_penalty=1.5, output_presence_penalty=1.0, min_p=0.01)
    whole = driver.admit(PROMPT, 30, sampling=sampling)
    driver.run()
    first = driver.admit(PROMPT, 30, sampling=sampling)
    for _ in range(11):
        driver.step()
    second = driver.preempt(first)
    driver.run()
    assert first.tokens + second.tokens == whole.tokens


def test_prompt_top_tokens_do_not_depend_on_chunks(driver: Driver) -> None:
    whole = driver.admit(PROMPT, 1, prompt_logprobs=True, prompt_top_n=4)
    chunked = driver.admit(PROMPT, 1, prompt_logprobs=True, prompt_top_n=4, chunk=7)
    silent = driver.admit(PROMPT, 1, prompt_logprobs=True)
    driver.run()
    assert silent.prompt_scores[0].tops is None
    assert silent.prompt_logprobs[0][1:] == pytest.approx(whole.prompt_logprobs[0][1:], abs=1e-5)
    tops, again = whole.prompt_scores[0].tops, chunked.prompt_scores[0].tops
    assert tops is not None
    assert again is not None
    assert tops[0] == ((), ())
    assert math.isnan(whole.prompt_logprobs[0][0])
    for position, (ids, logprobs) in enumerate(tops[1:], 1):
        assert len(ids) == len(set(ids)) == 4
        assert list(logprobs) == sorted(logprobs, reverse=True)
        if PROMPT[position] in ids:
            own = logprobs[ids.index(PROMPT[position])]
            assert own == pytest.approx(whole.prompt_logprobs[0][position], abs=1e-5)
        else:
            assert whole.prompt_logprobs[0][position] <= logprobs[-1] + 1e-5
        assert again[position][1] == pytest.approx(logprobs, abs=1e-4)
