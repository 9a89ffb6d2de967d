"""Sequences with late masks get the same tokens and log-probabilities, whatever runs, ends or is released beside them.

The executor of a GPU runs here on a CPU with the reference kernels.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from byte_tokenizer import END, write_tokenizer
from engine_driver import Driver, Stream
from full_grid import full
from model_families import FAMILIES, random_model, tiny_config, write_model
from reference_kernels import reference_engine
from tiny_engines import TINY_LLAMA

from text_generation_proto.values import Grammar, GrammarKind, Sampling, Stopping, WarmUpLimits
from text_generation_shard import grammar
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.grammar import load_grammars
from text_generation_shard.step import masks

SAMPLED = Sampling(greedy=False, temperature=1.1, seed=5, repetition_penalty=1.2, output_presence_penalty=0.5)
GRAMMARS = [
    Grammar(GrammarKind.REGEX, r"(abc|[0-9]{2,5}-x){4,9}"),
    Grammar(GrammarKind.LARK, 'start: ("yes" | "no" " "? /[a-f]{3}/)+'),
    Grammar(GrammarKind.REGEX, r"[a-m ]{60}"),
    None,
]
PROMPT = tuple(range(70, 110))
STOPPING = Stopping(24, frozenset({END}))


def on_a_gpu(folder: Path) -> Engine:
    """Build the engine of a GPU, on a CPU."""
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | {"vocab_size": 300, "eos_token_id": [END]}))
    config = ShardConfig(model_path=str(folder), load_format="dummy", device="cpu", max_batch_size=8)
    return reference_engine(config, load_grammars(str(folder), [END]))


def with_states(folder: Path) -> Engine:
    """Build the engine of a model whose state cannot take a token twice."""
    changes = {**FAMILIES["lfm2"].changes, "vocab_size": 300}
    path = write_model(random_model(tiny_config("lfm2", changes)), folder)
    engine = build_engine(ShardConfig(engine="torch", model_path=path, device="cpu", max_batch_size=8))
    assert isinstance(engine, TorchEngine)
    assert engine._executor.has_states
    return engine


def admit(driver: Driver, number: int) -> Stream:
    """Admit one of some sequences with different grammars, settings and lengths."""
    return driver.admit(
        PROMPT[: len(PROMPT) - number % 3],
        stopping=STOPPING,
        sampling=SAMPLED if number % 2 else Sampling(),
        top_n=number % 3 % 2,
        chunk=100,
        grammar=GRAMMARS[number % len(GRAMMARS)],
    )


@pytest.mark.parametrize("build", [on_a_gpu, with_states])
@pytest.mark.parametrize("seed", [1, *(full(seed) for seed in range(2, 8))])
def test_late_masks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[Path], Engine], seed: int
) -> None:
    write_tokenizer(tmp_path)
    engine, draw = build(tmp_path), random.Random(seed)
    monkeypatch.setattr(masks, "STEP_BUDGET_S", 10.0)
    monkeypatch.setattr(grammar, "SLOW_MASK_S", 10.0)
    monkeypatch.setattr(masks, "SLOW_MASK_S", 10.0)
    monkeypatch.setattr(grammar, "MASK_BUDGET_S", 10.0)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=512)))
    alone = []
    for number in range(8):
        alone.append(admit(driver, number))
        driver.run()
    parts: dict[int, list[Stream]] = {}
    released: set[int] = set()
    for turn in range(60):
        if len(parts) < 8 and len(driver.streams) < 7:
            parts[len(parts)] = [admit(driver, len(parts))]
        monkeypatch.setattr(masks, "STEP_BUDGET_S", draw.choice((10.0, -1.0)))
        monkeypatch.setattr(grammar, "SLOW_MASK_S", draw.choice((10.0, 10.0, -1.0)))
        driver.step()
        number = draw.choice(list(parts))
        last = parts[number][-1]
        if turn % 6 == 5 and not last.is_over and number not in released and last.tokens:
            if draw.random() < 0.3:
                driver.release(last)
                released.add(number)
            elif len(parts[number]) == 1:
                parts[number].append(driver.preempt(last, top_n=number % 3 % 2))
    driver.run()
    assert len(parts) == 8
    for number, streams in parts.items():
        tokens = [token for stream in streams for token in stream.tokens]
        logprobs = [logprob for stream in streams for logprob in stream.logprobs]
        tops = [top.token_ids for stream in streams for top in stream.top_tokens]
        expected = alone[number]
        assert [stream.failure for stream in streams] == [None] * len(streams)
        count = len(tokens) if number in released else len(expected.tokens)
        assert tokens == expected.tokens[:count], (number, len(streams))
        assert logprobs == pytest.approx(expected.logprobs[:count], abs=1e-4)
        assert tops == [top.token_ids for top in expected.top_tokens][: len(tops)]
        assert number in released or streams[-1].finish is expected.finish
