"""Traps of the real library that the stand-in sets: see the sources in trtllm_standin.release and engine."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import RANKS, fill
from model_folders import engine as compiled
from standin import CONFIG, model_folder, read_log
from trtllm_engines import Engines, until

from text_generation_proto.values import FailureCode, LogprobOptions, Sampling, Stopping, TraceContext, WarmUpLimits
from text_generation_shard.engine import EngineError, NewSequence, Orders
from text_generation_shard.engines.tensorrt_llm.engine import TensorRTEngine

PROMPT = tuple(range(100, 120))
SCORED = LogprobOptions(tokens=True)


def admit(engine: TensorRTEngine, slot: int, new: int, **fields: Any) -> None:  # noqa: ANN401 - fields of NewSequence
    sequence = NewSequence(**{"slot": slot, "prompt": PROMPT, "stopping": Stopping(new)} | fields)
    assert engine.apply(Orders(1, placements=(sequence,))) == []


def until_submitted(log: Path, count: int) -> None:
    """Wait until so many requests have arrived; the first is the probe."""
    until(lambda: len(read_log(log).of("request")) > count)


def run(engine: TensorRTEngine) -> None:
    deadline = time.monotonic() + 20
    while engine.running and time.monotonic() < deadline:
        result = engine.step()
        assert result is None or result.failed == []
    assert not engine.running


def until_tokens(engine: TensorRTEngine, slot: int) -> None:
    while (result := engine.step()) is None or slot not in result.slots:
        pass


@pytest.mark.parametrize("version", ["1.2"], indirect=True)
def test_a_compiled_engine_survives_clients_that_leave(built: Engines, tmp_path: Path) -> None:
    """Issue #10810: with log-probabilities it crashes when a running request is aborted."""
    config = compiled(build_config__gather_generation_logits=True)
    engine = built(folder=fill(tmp_path / "compiled", config, RANKS), num_shard=2, step_ms=2, log=tmp_path / "log")
    admit(engine, 0, 60, logprobs=SCORED)
    admit(engine, 1, 2000)
    until_tokens(engine, 1)
    engine.apply(Orders(2, release=(0, 1)))
    admit(engine, 2, 100, logprobs=SCORED)
    run(engine)
    ends = [(end["reason"], end["tokens"]) for end in read_log(tmp_path / "log").of("end")[1:]]
    assert ("length", 60) in ends
    assert sum(reason == "cancelled" for reason, _ in ends) == 1


@pytest.mark.parametrize("version", ["1.3"], indirect=True)
def test_a_scored_prompt_whose_client_leaves_stops_nobody(built: Engines, tmp_path: Path) -> None:
    engine = built(options="{max_num_tokens: 32}", prefill_us=2000, log=tmp_path / "log")
    admit(engine, 0, 5, prompt=PROMPT * 5, logprobs=LogprobOptions(prompt=True))
    until_submitted(tmp_path / "log", 1)
    engine.apply(Orders(2, release=(0,)))
    admit(engine, 1, 5)
    run(engine)


def test_requests_that_leave_in_the_engines_queue_leave_no_entries(built: Engines, tmp_path: Path) -> None:
    engine = built(max_batch_size=2, log=tmp_path / "log", step_ms=30)
    for number in range(1, 6):  # the engine still has those of the round before
        admit(engine, 0, 50)
        admit(engine, 1, 50)
        until_submitted(tmp_path / "log", 2 * number)
        engine.apply(Orders(2, release=(0, 1)))
    admit(engine, 0, 5)
    run(engine)
    ends = read_log(tmp_path / "log").ends
    assert (ends["dropped"], read_log(tmp_path / "log").unfinished) == (0, set())


def test_statistics_do_not_block_requests(built: Engines, tmp_path: Path) -> None:
    engine = built(log=tmp_path / "log", step_ms=3)
    admit(engine, 0, 300)
    run(engine)
    assert engine.used_blocks or engine.queued == 0
    assert read_log(tmp_path / "log").of("blocked") == []


def test_attention_data_parallelism_counts_all_ranks(built: Engines) -> None:
    plain = built(max_batch_size=4, num_shard=2)
    engine = built(max_batch_size=4, num_shard=2, options="{enable_attention_dp: true, max_seq_len: 2048}", step_ms=5)
    assert (plain.info.max_slots, engine.info.max_slots) == (4, 8)
    small = "{enable_attention_dp: true, kv_cache_config: {max_tokens: 512}}"
    assert built(num_shard=2, options=small).info.max_sequence_length == 512
    for slot in range(8):
        admit(engine, slot, 200)
    until_tokens(engine, 7)
    assert engine.used_blocks % 2 == 0
    engine.reset()


def test_a_length_beyond_the_models_is_refused(built: Engines, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="max_seq_len 4096 exceeds the model's 2048 positions"):
        built(options="{max_seq_len: 4096}")
    monkeypatch.setenv("TLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    if version == "1.3":
        assert built(options="{max_seq_len: 4096}").info.max_sequence_length == 4096


@pytest.mark.parametrize("asked", [None, "0"])
def test_usage_is_not_reported_unless_the_operator_says_so(
    built: Engines, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None
) -> None:
    monkeypatch.delenv("TRTLLM_NO_USAGE_STATS", raising=False)
    if asked is not None:
        monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", asked)
    built(log=tmp_path / "log")
    monkeypatch.delenv("TRTLLM_NO_USAGE_STATS")
    assert bool(read_log(tmp_path / "log").of("usage")) is (version == "1.3" and asked == "0")


@pytest.mark.parametrize("version", ["1.3"], indirect=True)
def test_scored_prompts_are_bounded(built: Engines, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "large", vocab_size=1 << 20, max_position_embeddings=4096)
    engine = built(folder=folder)
    scored = NewSequence(0, PROMPT * 60, Stopping(1), logprobs=LogprobOptions(prompt=True))
    [failure] = engine.apply(Orders(1, placements=(scored,)))
    assert failure.message == "the prompt has 1200 tokens, and log-probabilities are computed for at most 1024"
    admit(engine, 0, 1, prompt=scored.prompt[:1000], logprobs=scored.logprobs)
    run(engine)


@pytest.mark.parametrize(("capability", "refused"), [((8, 9), True), ((9, 0), False)])
def test_prompts_that_an_engine_would_never_start_are_refused(
    built: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, refused: bool
) -> None:
    """Multi-head latent attention computes prompts in chunks on some GPUs only; the option is silently ignored on others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    engine = built(folder=model_folder(tmp_path / "mla", kv_lora_rank=512), options="{max_num_tokens: 64}")
    failures = engine.apply(Orders(1, placements=(NewSequence(0, PROMPT * 5, Stopping(1)),)))
    assert ["computes at most 64" in failure.message for failure in failures] == [True] * refused
    engine.reset()


@pytest.mark.parametrize("version", ["1.2"], indirect=True)
def test_an_attention_backend_without_chunks_limits_prompts(built: Engines) -> None:
    engine = built(options="{max_num_tokens: 64, attn_backend: FLASHINFER_STAR_ATTENTION}")
    [failure] = engine.apply(Orders(1, placements=(NewSequence(0, PROMPT * 5, Stopping(1)),)))
    assert "computes at most 64" in failure.message


def test_an_error_of_the_guided_decoder_names_the_way_out(built: Engines, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "slow")
    (folder / "tokenizer.json").write_text(json.dumps({"model": CONFIG}))
    with pytest.raises(EngineError, match="without grammars: --trtllm-options 'guided_decoding_backend: null'"):
        built(folder=folder)
    engine = built(folder=folder, options="{guided_decoding_backend: null}")
    assert replace(engine.info).grammar_kinds == ()


def test_statistics_do_not_stand_still(built: Engines) -> None:
    """Iterations are signs of life. Once no entry came in time, 1.2 ends its feed until the next request."""
    engine = built(options="max_num_tokens: 64", prefill_us=1000, stats_ms=200)
    admit(engine, 0, 5, prompt=PROMPT * 100)  # two seconds without output
    signs = [engine.activity().last_sign]
    for _ in range(2):
        until(lambda: engine.activity().last_sign != signs[-1])
        signs.append(engine.activity().last_sign)
    activity = engine.activity()
    assert (activity.running, activity.waiting_prompt_tokens) == (1, 2000)
    assert engine.used_blocks > 0
    engine.reset()


def test_short_answers_at_low_load_are_counted(built: Engines) -> None:
    """An answer may begin and end between two polls."""
    engine = built(stats_ms=200)
    engine.step()
    told = 0
    for _ in range(3):
        admit(engine, 0, 5)
        while engine.running:
            told += result.forward_ns if (result := engine.step()) is not None else 0

    def all_are_told() -> bool:
        nonlocal told
        told += result.forward_ns if (result := engine.step()) is not None else 0
        return told >= 15_000_000  # all iterations of the three answers

    until(all_are_told)


@pytest.mark.parametrize("extra", ["host_cache_size: 33554432", "max_attention_window: [64, 64, 512]"])
def test_the_pool_is_that_of_the_gpu(built: Engines, version: str, tmp_path: Path, extra: str) -> None:
    """The library's figure counts blocks of host memory, and adds up the blocks of all attention windows."""
    options = f"kv_cache_config: {{max_tokens: 512, {extra}}}"
    engine = built(options=options, step_ms=12, log=tmp_path / "log")
    assert engine.warm_up(WarmUpLimits())[0].num_blocks == 16
    over = NewSequence(9, PROMPT, Stopping(500))
    [failure] = engine.apply(Orders(1, placements=(over,)))
    assert (failure.code, failure.message) == (
        FailureCode.INVALID,
        "prompt and new tokens exceed the engine's KV pool of 512 tokens",
    )
    for slot in range(4):
        admit(engine, slot, 100)  # four blocks each: all of them
    until(lambda: engine.step() and engine.used_blocks)
    # A window of 64 tokens takes two blocks of each; 1.2 reports the sum over the windows only.
    assert engine.used_blocks == (12 if "window" in extra and version == "1.2" else 16)
    run(engine)
    assert read_log(tmp_path / "log").of("wait") == []


@pytest.mark.parametrize("traced", [True, False])
def test_spans_need_metrics_of_the_request(built: Engines, tmp_path: Path, *, traced: bool) -> None:
    options = "otlp_traces_endpoint: http://127.0.0.1:9/v1/traces\nprint_iter_log: false" if traced else ""
    engine = built(options=options, log=tmp_path / "log")
    admit(engine, 0, 2, trace=TraceContext("00-" + "1" * 32 + "-" + "2" * 16 + "-01", ""))
    run(engine)
    assert len(read_log(tmp_path / "log").of("span")) == traced


@pytest.mark.parametrize("version", ["1.3"], indirect=True)
def test_what_a_request_leaves_out_is_not_filled_in(built: Engines, tmp_path: Path) -> None:
    """With `generation_config: auto` the library takes it from generation_config.json."""
    folder = model_folder(tmp_path / "qwen")
    (folder / "generation_config.json").write_text('{"top_k": 20, "repetition_penalty": 1.05}')
    with pytest.raises(EngineError, match="generation_config is not set here"):
        built(folder=folder, options="{generation_config: auto}")
    engine = built(folder=folder, options="{generation_config: trtllm}", log=tmp_path / "log")
    admit(engine, 0, 2, sampling=Sampling(greedy=False))
    run(engine)
    assert "top_k" not in read_log(tmp_path / "log").of("request")[-1]["sampling"]


def test_an_engine_that_is_closed_amid_streams_has_one_caller(built: Engines, tmp_path: Path) -> None:
    """Requests and aborts are sent on sockets that two threads must not use at once, and shutdown aborts all requests itself."""
    engine = built(step_ms=2, log=tmp_path / "log")
    for slot in range(64):
        admit(engine, slot, 1000)
    until_tokens(engine, 0)
    built.close()
    log = read_log(tmp_path / "log")
    assert (log.of("raced"), log.unfinished) == ([], set())
    assert log.ends["cancelled"] > 0  # on a slow machine, some end by themselves first
