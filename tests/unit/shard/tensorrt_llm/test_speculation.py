"""Speculative decoding in both releases: each kind of drafter serves, and what it excludes is refused by name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from standin import read_log

from text_generation_proto.values import FinishReason, LogprobOptions, Sampling, Stopping
from text_generation_shard.engine import EngineError, NewSequence, Orders, StepResult
from text_generation_shard.engines.tensorrt_llm.engine import TensorRTEngine

PROMPT = tuple(range(100, 120))
Build = Callable[..., TensorRTEngine]

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


def run(engine: TensorRTEngine, *sequences: NewSequence) -> list[StepResult]:
    """Run sequences to their ends."""
    assert engine.apply(Orders(1, placements=sequences)) == []
    results = []
    while engine.running:
        if (result := engine.step()) is not None:
            results.append(result)
            assert result.failed == []
    return results


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_serves_several_tokens_a_step(built: Build, version: str, tmp_path: Path, name: str) -> None:
    """Also requests that would have log-probabilities: TGI's streams get none."""
    if version == "1.2" and name in ONLY_IN_1_3:
        with pytest.raises(EngineError, match=f"has no drafter {name}$|sa_config"):
            built(options=options(**DRAFTERS[name]))
        return
    engine = built(options=options(**DRAFTERS[name]), step_ms=4, log=tmp_path / "log")
    drawn = Sampling(greedy=False, temperature=0.5)
    results = run(
        engine,
        NewSequence(0, PROMPT, Stopping(60), logprobs=LogprobOptions(tokens=True)),
        NewSequence(1, PROMPT, Stopping(60), drawn),
    )
    for slot in (0, 1):
        tokens: list[int] = []
        for result in results:
            at = 0
            for other, count in zip(result.slots, result.token_counts, strict=True):
                tokens += result.token_ids[at : at + count] if other == slot else []
                at += count
        assert tokens == list(islice(cycle(PROMPT), 60))
    assert {reason for result in results for _, reason in result.finished} == {FinishReason.LENGTH}
    assert max(max(result.token_counts) for result in results) > 1
    assert sum(len(result.token_ids) for result in results) > 1.2 * sum(len(result.slots) for result in results)
    assert read_log(tmp_path / "log").of("greedy") == []
    refused = {field for field, _ in engine.info.unsupported}
    assert {"tokens", "top_n", "prompt"} <= refused
    in_model = name in IN_MODEL or (name.startswith("draft model") and version == "1.3")
    assert ("logit_bias_ids" in refused) is in_model
    assert ("min_p" in refused) is (in_model or version == "1.2")


def test_acceptance_is_reported(built: Build) -> None:
    engine = built(options=options(**DRAFTERS["NGram"]), step_ms=5)
    results = run(engine, NewSequence(0, PROMPT, Stopping(1000)))
    deadline = time.monotonic() + 20
    while not (told := [result.drafting for result in results if result.drafting is not None]) or (
        sum(one.accepted_tokens + one.drafts for one in told) < 999
    ):
        assert time.monotonic() < deadline
        if (late := engine.step()) is not None:  # the statistics of the last iterations
            results.append(late)
        else:
            time.sleep(0.01)
    drafts = sum(one.drafts for one in told)
    assert 0 <= sum(one.accepted_tokens for one in told) + drafts - 999 <= 3  # the limit cuts the last step
    assert sum(one.draft_tokens for one in told) == 3 * drafts
    assert sum(result.forward_ns for result in results) > 0


def test_the_pool_has_room_for_the_drafts_of_a_sequence(built: Build) -> None:
    """The engine would never start a sequence without it."""
    text = json.dumps({"speculative_config": DRAFTERS["NGram"], "kv_cache_config": {"max_tokens": 512}})
    engine = built(options=text)
    [failure] = engine.apply(Orders(1, placements=(NewSequence(0, PROMPT, Stopping(512 - len(PROMPT) - 5)),)))
    assert "KV pool of 506 tokens" in failure.message
    results = run(engine, NewSequence(0, PROMPT, Stopping(512 - len(PROMPT) - 6)))
    assert sum(len(result.token_ids) for result in results) == 512 - len(PROMPT) - 6


EXCLUDED: dict[str, tuple[str, dict[str, Any]]] = {
    "top_n": ("", {"logprobs": LogprobOptions(2)}),
    "prompt": ("", {"logprobs": LogprobOptions(prompt=True)}),
    "min_new_tokens": ("MTP", {"stopping": Stopping(9, min_new_tokens=3)}),
    "min_p": ("MTP", {"sampling": Sampling(greedy=False, min_p=0.1)}),
    "logit_bias_ids": ("MTP", {"sampling": Sampling(logit_bias_ids=(5,), logit_bias_values=(1.0,))}),
    "repetition_penalty": ("MTP", {"sampling": Sampling(repetition_penalty=1.2)}),
}


@pytest.mark.parametrize("name", EXCLUDED)
def test_excluded_parameters_are_refused_and_harm_nobody(built: Build, name: str) -> None:
    kind, fields = EXCLUDED[name]
    engine = built(options=options(**DRAFTERS[kind or "NGram"]))
    asked = NewSequence(**{"slot": 1, "prompt": PROMPT, "stopping": Stopping(9)} | fields)
    [failure] = engine.apply(Orders(1, placements=(NewSequence(0, PROMPT, Stopping(9)), asked)))
    assert failure.slot == 1
    assert failure.message.startswith(f"{name} is not supported: ")
    assert "speculative decoding" in failure.message
    while engine.running:
        result = engine.step()
        assert result is None or result.failed == []


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"decoding_type": "Medusa"}, "decoding_type must be one of MTP, Eagle, Eagle3, NGram, DraftTarget, Auto, SA"),
    ({}, "decoding_type must be one of"),
    ({"decoding_type": "NGram"}, "max_draft_len must be > 0"),
    ({"decoding_type": "Eagle3", "max_draft_len": 3}, "Draft model must be provided"),
    ({"decoding_type": "NGram", "max_draft_len": 3, "draft_len": 4}, "draft_len"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_configuration_ends_the_start_with_one_line(built: Build, config: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError) as refused:
        built(options=options(**config))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["MTP", "NGram", "Eagle3 in two models"])
def test_a_drafter_and_stages_exclude_each_other(built: Build, name: str) -> None:
    text = json.dumps({"speculative_config": DRAFTERS[name], "pipeline_parallel_size": 2})
    with pytest.raises(EngineError, match=r"pipeline_parallel_size and speculative_config .* exclude each other"):
        built(options=text, num_shard=2)


@pytest.mark.parametrize("version", ["1.2"], indirect=True)
def test_the_other_sampler_does_not_speculate(built: Build) -> None:
    text = json.dumps({"speculative_config": DRAFTERS["MTP"], "sampler_type": "TRTLLMSampler"})
    with pytest.raises(EngineError, match="sampler_type TRTLLMSampler and speculative_config"):
        built(options=text)


def test_a_configuration_that_is_no_mapping_is_refused(built: Build) -> None:
    with pytest.raises(EngineError, match="must be a mapping with decoding_type"):
        built(options="speculative_config: NGram\nmax_num_tokens: 512")
