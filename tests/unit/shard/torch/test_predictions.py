"""Drafts by the layer that predicts the token after the next one are those of transformers' layers, whatever came before."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from full_grid import full
from native_families import native_configs
from prediction_layers import PredictionLayer
from reference_kernels import reference_engine
from reference_ops import relative_error
from scripted_drafts import ScriptedDrafts, draft_by
from tiny_transformers import SHAPE

from text_generation_proto.values import PREDICTED, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.runner.cpu_runner import CpuRunner
from text_generation_shard.step.drafts.drafter import Drafter
from text_generation_shard.step.sequence import Draft, Sequence

CONFIGS = native_configs(SHAPE | {"initializer_range": 0.05}, head_dim=16, wide_head_dim=24)
MOST = 3
PROMPTS = [tuple((37 * i + length) % 331 for i in range(length)) for length in (40, 7, 19)]


class Predicted(Drafter):
    """Drafts of MOST tokens in each step, some of which are made right, so that steps yield several tokens."""

    def __init__(self, texts: Sequences[Sequences[int]] = ()) -> None:
        super().__init__(MOST, 1 << 30, runs_ahead=True)
        self.texts = texts
        self.found: list[tuple[list[int], tuple[int, ...]]] = []

    def may_draft(self, rows: int) -> bool:
        return True

    def pay_after(self, sequences: Sequences[Sequence], *, prompts: bool) -> bool:
        return True

    def drafts(self, sequences: Sequences[Sequence]) -> dict[int, Draft]:
        assert self.predictor is not None
        lengths = {
            each.slot: min(MOST, each.end - len(each.tokens)) for each in sequences if self.predictor.may_follow(each)
        }
        found = self.predictor.drafts(lengths)
        assert {slot: len(tokens) for slot, tokens in found.items()} == {
            slot: length for slot, length in lengths.items() if length > 0
        }
        self.found += [(list(each.tokens), found[each.slot]) for each in sequences if each.slot in found]
        drafts = {}
        for each in sequences:
            if each.slot in found:
                text = next((text for text in self.texts if [*text[: len(each.tokens)]] == each.tokens), ())
                right = tuple(text[len(each.tokens) :][: len(each.tokens) % MOST])
                tokens = (*right, *found[each.slot][len(right) :])
                drafts[each.slot] = Draft(tokens[: lengths[each.slot]], PREDICTED, 0)
        return drafts


@pytest.mark.parametrize("build", [build_engine, reference_engine], ids=["CPU", "device"])
@pytest.mark.parametrize("family", ["qwen3_next", full("qwen3_5_text"), full("qwen3_5_moe_text")])
def test_drafts_are_those_of_the_layer(
    family: str, build: Callable[[ShardConfig], TorchEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = PredictionLayer(CONFIGS[family])
    folder = layer.write(tmp_path)
    engine = build(ShardConfig(model_path=str(folder), device="cpu", dtype="float32", max_batch_size=4, speculate="3"))
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))
    executor = engine._executor
    if isinstance(executor._runner, CpuRunner):  # which clears each block that is entered
        with torch.inference_mode():
            for layer_cache in executor._runner.cache:
                layer_cache.fill_(torch.nan)
    logits: list[torch.Tensor] = []
    predict = executor.predict

    def recorded(*arguments: object, drafts: bool) -> tuple[torch.Tensor, list[int]]:
        hidden, tokens = predict(*arguments, drafts=drafts)  # type: ignore[arg-type]
        logits.extend(executor._runner.logits(hidden))
        return hidden, tokens

    monkeypatch.setattr(executor, "predict", recorded)
    draft_by(engine, None)
    streams = [driver.admit(prompt, 20, chunk=chunk) for prompt, chunk in zip(PROMPTS, (9, 16, 100), strict=True)]
    driver.run()
    plain = [(stream.tokens, stream.logprobs) for stream in streams]
    drafter = Predicted([[*stream.prompt, *stream.tokens] for stream in streams])
    draft_by(engine, drafter)
    streams = [driver.admit(prompt, 20, chunk=chunk) for prompt, chunk in zip(PROMPTS, (9, 16, 100), strict=True)]
    steps = 0
    while driver.step() is not None:
        steps += 1
    for stream, (tokens, logprobs) in zip(streams, plain, strict=True):
        assert stream.tokens == tokens
        assert stream.logprobs == pytest.approx(logprobs, abs=3e-5)
    assert steps < 20
    assert len(drafter.found) > 15
    for tokens, found in drafter.found:
        expected, own = layer.drafts(tokens, len(found))
        assert list(found) == expected
        for each in own:
            assert min(relative_error(other, each) for other in logits) < 1e-5
    # Steps without predictions leave positions without keys and values, and no other numbers there.
    logits.clear()
    draft_by(engine, None)
    driver.admit(PROMPTS[0], 60)
    for _ in range(20):
        driver.step()
    draft_by(engine, Predicted())
    driver.run()
    assert logits
    assert all(each.isfinite().all() for each in logits)


def test_an_error_of_the_layer_costs_its_drafts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PredictionLayer(CONFIGS["qwen3_5_text"]).write(tmp_path)
    engine = build_engine(ShardConfig(model_path=str(folder), device="cpu", max_batch_size=4, speculate="8"))
    assert isinstance(engine, TorchEngine)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))
    draft_by(engine, None)
    plain = [driver.alone(prompt, 12) for prompt in PROMPTS]
    failures: list[object] = []

    def fail(*arguments: object, **_: object) -> None:
        failures.append(arguments)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine._executor, "predict", fail)
    draft_by(engine, ScriptedDrafts([], 331))
    assert [driver.alone(prompt, 12) for prompt in PROMPTS] == plain
    assert failures
