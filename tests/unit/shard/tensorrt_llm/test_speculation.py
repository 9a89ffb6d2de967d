"""Speculative decoding in both releases: each kind of drafter serves, and what it excludes is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from self_driver import SelfDriver
from standin import read_log
from trtllm_engines import Engines, until

from text_generation_proto.values import FinishReason, LogprobOptions, Sampling, Stopping
from text_generation_shard.engine import Drafting, EngineError, NewSequence, Orders, StepResult

PROMPT = tuple(range(100, 120))

DRAFTERS: dict[str, dict[str, Any]] = {
    "MTP": {"decoding_type": "MTP", "num_nextn_predict_layers": 3},
    "MTP with max_draft_len": {"decoding_type": "MTP", "max_draft_len": 3},
    "MTP in two models": {"decoding_type": "MTP", "max_draft_len": 3, "mtp_eagle_one_model": False},
    "Eagle3": {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "draft"},
    "Eagle": {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": "draft"},
    "Eagle3 in two models": {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "speculative_model": "draft",
        "eagle3_one_model": False,
    },
    "NGram": {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2},
    "draft model, spelled as in 1.2": {
        "decoding_type": "DraftTarget",
        "max_draft_len": 3,
        "speculative_model": "draft",
    },
    "draft model, spelled as in 1.3": {
        "decoding_type": "Draft_Target",
        "max_draft_len": 3,
        "speculative_model": "draft",
    },
}
ONLY_IN_1_3: dict[str, dict[str, Any]] = {
    "SA": {"decoding_type": "SA", "max_draft_len": 3},
    "MTP with SA": {"decoding_type": "MTP", "max_draft_len": 3, "sa_config": {"threshold": 4}},
    **{
        kind: {"decoding_type": kind, "max_draft_len": 3, "speculative_model": "draft"}
        for kind in ("PARD", "DFlash", "DSpark")
    },
}
DRAFTERS |= {"AUTO": {"decoding_type": "AUTO"}, **ONLY_IN_1_3}
IN_MODEL = {"MTP", "MTP with max_draft_len", "Eagle3", "Eagle", *ONLY_IN_1_3}


def options(**config: object) -> str:
    return json.dumps({"speculative_config": config})


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_serves_several_tokens_a_step(built: Engines, version: str, tmp_path: Path, name: str) -> None:
    """Also requests that would have log-probabilities: TGI's streams get none."""
    if version == "1.2" and name in ONLY_IN_1_3:
        with pytest.raises(EngineError, match=f"has no drafter {name}$|sa_config"):
            built(options=options(**DRAFTERS[name]))
        return
    engine = built(options=options(**DRAFTERS[name]), step_ms=4, log=tmp_path / "log")
    driver = SelfDriver(engine)
    streams = driver.admit(PROMPT, 60), driver.admit(PROMPT, 60, sampling=Sampling(greedy=False, temperature=0.5))
    results = []
    while driver.streams:
        if (result := driver.step()) is not None:
            results.append(result)
    for stream in streams:
        assert (stream.tokens, stream.finish) == ([*PROMPT * 3], FinishReason.LENGTH)
    assert max(max(result.token_counts, default=0) for result in results) > 1
    assert sum(len(result.token_ids) for result in results) > 1.2 * sum(len(result.slots) for result in results)
    assert read_log(tmp_path / "log").of("greedy") == []
    refused = {field for field, _ in engine.info.unsupported}
    assert {"tokens", "top_n", "prompt"} <= refused
    in_model = name in IN_MODEL or (name.startswith("draft model") and version == "1.3")
    assert ("logit_bias_ids" in refused) is in_model
    assert ("min_p" in refused) is (in_model or version == "1.2")


def drafting(result: StepResult) -> Drafting:
    [told] = result.drafting or [Drafting()]
    assert told.source == "engine"
    return told


def test_acceptance_is_reported(built: Engines) -> None:
    engine = built(options=options(**DRAFTERS["NGram"]), step_ms=5)
    driver = SelfDriver(engine)
    driver.admit(PROMPT, 1000)
    results: list[StepResult] = []

    def step() -> int:
        if (result := driver.step()) is not None:
            results.append(result)
        return sum(told.accepted_tokens + told.drafts for told in map(drafting, results))

    while driver.streams:
        step()
    until(lambda: step() >= 999)  # the statistics of the last iterations
    told = [*map(drafting, results)]
    drafts = sum(one.drafts for one in told)
    assert 0 <= sum(one.accepted_tokens for one in told) + drafts - 999 <= 3  # the limit cuts the last step
    assert sum(one.draft_tokens for one in told) == 3 * drafts
    assert sum(result.forward_ns for result in results) > 0


def test_acceptance_is_counted_from_responses_where_they_tell_it(built: Engines) -> None:
    engine = built(options=options(**DRAFTERS["NGram"]), drafts_in_responses=True)
    driver = SelfDriver(engine)
    told: list[Drafting] = []
    # While the second sequence runs, the statistics of the first come, which do not count again.
    for number in (1, 2):
        driver.admit(PROMPT, 400)
        while driver.streams:
            if (result := driver.step()) is not None:
                told.append(drafting(result))
        # Complete with the last tokens, which the statistics are not; the limit cuts the last step.
        drafts = sum(one.drafts for one in told)
        assert 0 <= sum(one.accepted_tokens for one in told) + drafts - number * 399 <= 3 * number
        assert sum(one.draft_tokens for one in told) == 3 * drafts


def test_the_pool_has_room_for_the_drafts_of_a_sequence(built: Engines) -> None:
    """The engine would never start a sequence without it."""
    text = json.dumps({"speculative_config": DRAFTERS["NGram"], "kv_cache_config": {"max_tokens": 512}})
    engine = built(options=text)
    [failure] = engine.apply(Orders(1, placements=(NewSequence(0, PROMPT, Stopping(512 - len(PROMPT) - 5)),)))
    assert "KV pool of 506 tokens" in failure.message
    driver = SelfDriver(engine)
    fits = driver.admit(PROMPT, 512 - len(PROMPT) - 6)
    driver.run()
    assert len(fits.tokens) == 512 - len(PROMPT) - 6


EXCLUDED: dict[str, tuple[str, dict[str, Any]]] = {
    "top_n": ("", {"logprobs": LogprobOptions(2)}),
    "prompt": ("", {"logprobs": LogprobOptions(prompt=True)}),
    "min_new_tokens": ("MTP", {"stopping": Stopping(9, min_new_tokens=3)}),
    "min_p": ("MTP", {"sampling": Sampling(greedy=False, min_p=0.1)}),
    "logit_bias_ids": ("MTP", {"sampling": Sampling(logit_bias_ids=(5,), logit_bias_values=(1.0,))}),
    "repetition_penalty": ("MTP", {"sampling": Sampling(repetition_penalty=1.2)}),
}


@pytest.mark.parametrize("kind", ["MTP", "NGram"])
def test_excluded_parameters_are_refused(built: Engines, kind: str) -> None:
    engine = built(options=options(**DRAFTERS[kind]))
    for name, (only, fields) in EXCLUDED.items():
        if only in ("", kind):
            asked = NewSequence(**{"slot": 1, "prompt": PROMPT, "stopping": Stopping(9)} | fields)
            [failure] = engine.apply(Orders(1, placements=(asked,)))
            assert failure.message.startswith(f"{name} is not supported: ")
            assert "speculative decoding" in failure.message


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"decoding_type": "Medusa"}, "decoding_type must be one of MTP, Eagle, Eagle3, NGram, DraftTarget, Auto, SA"),
    ({}, "decoding_type must be one of"),
    ({"decoding_type": "NGram"}, "max_draft_len must be > 0"),
    ({"decoding_type": "Eagle3", "max_draft_len": 3}, "Draft model must be provided"),
    ({"decoding_type": "NGram", "max_draft_len": 3, "draft_len": 4}, "draft_len"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_configuration_ends_the_start_with_one_line(
    built: Engines, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError) as refused:
        built(options=options(**config))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["MTP", "NGram", "Eagle3 in two models"])
def test_a_drafter_and_stages_exclude_each_other(built: Engines, name: str) -> None:
    text = json.dumps({"speculative_config": DRAFTERS[name], "pipeline_parallel_size": 2})
    with pytest.raises(EngineError, match=r"pipeline_parallel_size and speculative_config .* exclude each other"):
        built(options=text, num_shard=2)


@pytest.mark.parametrize("version", ["1.2"], indirect=True)
def test_the_other_sampler_does_not_speculate(built: Engines) -> None:
    text = json.dumps({"speculative_config": DRAFTERS["MTP"], "sampler_type": "TRTLLMSampler"})
    with pytest.raises(EngineError, match="sampler_type TRTLLMSampler and speculative_config"):
        built(options=text)


def test_a_configuration_that_is_no_mapping_is_refused(built: Engines) -> None:
    with pytest.raises(EngineError, match="must be a mapping with decoding_type"):
        built(options="speculative_config: NGram\nmax_num_tokens: 512")
