"""Drafts by the layer that predicts the token after the next one are those of transformers' layers, whatever came before."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from eagle_models import EagleModel
from engine_driver import Driver
from full_grid import full
from lora_folder import projections_of, random_adapter, vocabulary_of
from native_families import native_configs
from prediction_layers import PredictionLayer
from reference_kernels import reference_engine
from reference_ops import relative_error
from safetensors.torch import load_file, save_file
from scripted_drafts import Predicted, ScriptedDrafts, draft_by
from structlog.testing import capture_logs
from tiny_quantized import quantized_model
from tiny_transformers import SHAPE, random_model, save
from transformers import LlamaConfig, Qwen2Config
from vision_models import VisionModel, decoded, picture

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import LoadFormat, ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.attention.step import Step
from text_generation_shard.engines.torch.batch.step_plan import StepPlan
from text_generation_shard.engines.torch.build.footprint import native_footprint
from text_generation_shard.engines.torch.build.prepare import Target, prepare
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.engine.runner import ForwardOutput
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.runner.cpu_runner import CpuRunner
from text_generation_shard.engines.torch.runner.decode_graphs import DecodeGraphs
from text_generation_shard.engines.torch.runner.device_runner import DeviceRunner

CONFIGS = native_configs(SHAPE | {"initializer_range": 0.05}, head_dim=16, wide_head_dim=24)
MOST = 3
PROMPTS = [tuple((37 * i + length) % 331 for i in range(length)) for length in (40, 7, 19)]


class EagerPool:
    """Repeats a function in the place of a graph: its outputs stay in the same memory."""

    def record(self, function: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
        output = function()
        fields = ("normed", "logits", "sampled", "carried")
        kept = {name: each for name in fields if (each := getattr(output, name)) is not None}

        def work() -> None:
            again = function()
            for name, each in kept.items():
                each.copy_(getattr(again, name))

        return work, output


@torch.inference_mode()
def capture(runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run decode steps and predictions by graphs of all sizes; return the sizes of the predictions that do."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda each: each)
    slots, groups = runner._max_slots, len(runner.windows)
    update = slots * runner.max_blocks, runner._num_blocks[0]
    runner._graphs, runner._predictions = (
        DecodeGraphs(slots, slots, update, groups, run) for run in (runner._run, runner._run_prediction)
    )
    for graphs in (runner._graphs, runner._predictions):
        for size in reversed(graphs.sizes):
            graphs.capture(size, EagerPool())  # type: ignore[arg-type]
    replayed: list[int] = []
    replay = runner._predictions.replay

    def counted(plan: StepPlan, *arguments: torch.Tensor) -> ForwardOutput | None:
        if (output := replay(plan, *arguments)) is not None:
            replayed.append(plan.sizes.tokens)
        return output

    monkeypatch.setattr(runner, "_predictions", SimpleNamespace(replay=counted))
    return replayed


LAYERS = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe", "qwen2", "EAGLE-3"),
    *("EAGLE-3 of speculators", "EAGLE-3 without a head"),
)
OFTEN = {
    ("deepseek_v3", reference_engine),
    ("EAGLE-3 of speculators", build_engine),
    ("EAGLE-3 without a head", reference_engine),
}
"""Layers and engines that `make test` runs; tests/unit/shard/torch/test_drafts.py has the other two."""


@pytest.mark.parametrize(
    ("family", "build"),
    [each if each in OFTEN else full(*each) for each in product(LAYERS, (build_engine, reference_engine))],
    ids=lambda each: each if isinstance(each, str) else "CPU" if each is build_engine else "device",
)
def test_drafts_are_those_of_the_layer(
    family: str, build: Callable[[ShardConfig], TorchEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_eagle = family.startswith("EAGLE-3")
    layer: PredictionLayer | EagleModel
    if is_eagle:
        model = LlamaConfig(**SHAPE | {"initializer_range": 0.05})
        layer = EagleModel(model, speculators="of" in family, own_head="without" not in family)
    else:
        layer = PredictionLayer(CONFIGS[family])
    folder = str(layer.write(tmp_path))
    config = ShardConfig(model_path=folder, device="cpu", dtype="float32", max_batch_size=16, speculate="3")
    engine = build(config.model_copy(update={"speculator": f"{folder}/draft"}) if is_eagle else config)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=512)))
    executor = engine._executor
    if isinstance(executor._runner, CpuRunner):  # which clears each block that is entered
        with torch.inference_mode():
            for layer_cache in executor._runner.cache:
                layer_cache.fill_(torch.nan)
    replayed = []
    if isinstance(executor._runner, DeviceRunner) and not executor.has_states:  # whose reference takes no padding
        replayed = capture(executor._runner, monkeypatch)
    logits: list[torch.Tensor] = []
    model = executor._runner._model
    predicted = model.predicted

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        head = model._weights.prediction.head
        if len(hidden):
            logits.extend(model.logits(hidden) if head is None else head(hidden))
        return predicted(hidden)

    monkeypatch.setattr(model, "predicted", recorded)
    draft_by(engine, None)
    streams = [driver.admit(prompt, 20, chunk=chunk) for prompt, chunk in zip(PROMPTS, (9, 16, 100), strict=True)]
    driver.run()
    plain = [(stream.tokens, stream.logprobs) for stream in streams]
    drafter = Predicted(MOST, [[*stream.prompt, *stream.tokens] for stream in streams])
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
    assert isinstance(executor._runner, CpuRunner) or executor.has_states or len({*replayed}) > 2
    # Steps without predictions leave positions without keys and values, and no other numbers there.
    logits.clear()
    draft_by(engine, None)
    driver.admit(PROMPTS[0], 60)
    for _ in range(20):
        driver.step()
    draft_by(engine, Predicted(MOST))
    driver.run()
    assert logits
    assert all(each.isfinite().all() for each in logits)


def test_adapters_do_not_keep_the_layer_from_its_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = PredictionLayer(CONFIGS["qwen2"])
    folder = layer.write(tmp_path)
    random_adapter(folder / "adapter", projections_of(layer.model) | vocabulary_of(layer.model)[0], 0)
    settings = {"dtype": "float32", "max_batch_size": 16, "speculate": "3", "lora_adapters": f"a={folder / 'adapter'}"}
    engine = reference_engine(ShardConfig(model_path=str(folder), device="cpu", **settings))  # type: ignore[arg-type]
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))
    runner = engine._executor._runner
    assert isinstance(runner, DeviceRunner)
    replayed = capture(runner, monkeypatch)
    texts = []
    for drafter in (None, Predicted(MOST)):
        draft_by(engine, drafter)
        streams = [driver.admit(prompt, 12, adapter=name) for prompt, name in zip(PROMPTS, ("a", "", "a"), strict=True)]
        driver.run()
        texts.append([stream.tokens for stream in streams])
    assert texts[0] == texts[1]
    assert len(replayed) > MOST


def drafted(
    folder: Path, load_format: LoadFormat = "auto", dtype: Literal["float32"] | None = None
) -> list[tuple[list[int], tuple[int, ...]]]:
    """Return what the layer of a checkpoint drafts for a text, after each of its parts."""
    config = ShardConfig(model_path=str(folder), device="cpu", max_batch_size=4, speculate="3", load_format=load_format)
    engine = build_engine(config.model_copy(update={"dtype": dtype}))
    assert isinstance(engine, TorchEngine)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=512)))
    draft_by(engine, drafter := Predicted(MOST))
    driver.alone(PROMPTS[0], 6)
    return drafter.found


def change_config(folder: Path, changes: dict[str, object]) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize("of_layer", [True, False])
def test_the_layer_of_a_quantized_checkpoint_is_quantized_or_not(tmp_path: Path, *, of_layer: bool) -> None:
    for kind in ("quantized", "dense"):
        (tmp_path / kind).mkdir()
        folder = PredictionLayer(Qwen2Config(**SHAPE | {"hidden_size": 96, "intermediate_size": 128})).write(
            tmp_path / kind
        )
        for name in ("model", "predictions") if of_layer else ("model",):
            config, stored, dense = quantized_model(load_file(folder / f"{name}.safetensors"))
            save_file(stored if kind == "quantized" else dense, folder / f"{name}.safetensors")
    change_config(tmp_path / "quantized", {"quantization_config": config})
    assert drafted(tmp_path / "quantized") == drafted(tmp_path / "dense")


def test_a_layer_without_some_tensor_is_not_loaded(tmp_path: Path) -> None:
    folder = PredictionLayer(CONFIGS["qwen2"]).write(tmp_path)
    path = folder / "predictions.safetensors"
    save_file({name: each for name, each in load_file(path).items() if "q_proj" not in name}, path)
    with capture_logs() as logs:
        engine = build_engine(ShardConfig(model_path=str(folder), device="cpu", max_batch_size=4))
    assert isinstance(engine, TorchEngine)
    assert engine.predictions is None
    (line,) = [each for each in logs if each["event"] == "the layer that predicts tokens is not loaded"]
    assert "has no tensor model.mtp_layers.0.self_attn.q_proj.weight" in line["reason"]


@pytest.mark.parametrize("count", [0, 2])
def test_a_config_may_count_no_layer_or_several_of_which_the_first_is_used(count: int, tmp_path: Path) -> None:
    folder = (layer := PredictionLayer(CONFIGS["qwen2"])).write(tmp_path)
    tensors = load_file(path := folder / "predictions.safetensors")
    others = {name.replace("mtp_layers.0", "mtp_layers.1"): torch.zeros_like(each) for name, each in tensors.items()}
    save_file(tensors | others, path)
    change_config(folder, {"num_nextn_predict_layers": count})
    if count:
        for tokens, found in drafted(folder, dtype="float32"):
            assert list(found) == layer.drafts(tokens, len(found))[0]
    else:
        engine = build_engine(ShardConfig(model_path=str(folder), device="cpu", max_batch_size=4))
        assert isinstance(engine, TorchEngine)
        assert engine.predictions is None


def test_random_weights_have_the_layer_that_the_config_names_and_warm_up_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    folder, predict = Path(save(random_model(CONFIGS["qwen2"]), tmp_path)), CpuRunner.predict
    change_config(folder, {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1})

    def measured(
        runner: CpuRunner, plan: StepPlan, *arguments: object, drafts: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(plan.sizes.tokens)
        return predict(runner, plan, *arguments, drafts=drafts)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuRunner, "predict", measured)
    assert drafted(folder, "dummy")
    assert sizes[0] == max(sizes) > 256


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"draft_vocab_size": None, "architectures": ["LlamaForCausalLM"]}, "no draft model of the form of EAGLE-3"),
        ({"speculators_model_type": "eagle", "transformer_layer_config": {}}, "no draft model of the form of EAGLE-3"),
        ({"norm_before_fc": True}, "norm_before_fc True is not supported, only False"),
        ({"use_aux_norm": True}, "use_aux_norm True is not supported, only False"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False is not supported"),
        ({"model_type": "qwen3"}, "a draft model of type 'qwen3' is not supported, only llama"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, the model needs 1"),
        ({"vocab_size": 332}, "vocab_size is 332, the model needs 331"),
        ({"hidden_size": 40, "target_hidden_size": 48}, "it has no embedding, and the hidden size 40, not 48"),
        ({"target_hidden_size": 40}, "the hidden size of its target is 40, the model needs 48"),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "not three layers of 3"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized draft models are not supported"),
        ({"draft_vocab_size": 65}, r"lm_head\.weight has shape \[64, 48\], config\.json says \[65, 48\]"),
    ],
)
def test_other_draft_models_are_refused_by_name(changes: dict[str, object], problem: str, tmp_path: Path) -> None:
    draft = EagleModel(LlamaConfig(**SHAPE)).write(tmp_path) / "draft"
    change_config(draft, changes)
    with pytest.raises(EngineError, match=problem):
        build_engine(ShardConfig(model_path=str(tmp_path), device="cpu", max_batch_size=4, speculator=str(draft)))


def test_the_memory_of_a_draft_model_is_counted_beside_that_of_the_model(tmp_path: Path) -> None:
    draft = EagleModel(LlamaConfig(**SHAPE)).write(tmp_path) / "draft"
    config, found = ShardConfig(model_path=str(tmp_path), device="cpu", dtype="float32"), []
    for speculator in ("", str(draft)):
        own = config.model_copy(update={"speculator": speculator})
        prepared = prepare(own, read_model_config(tmp_path), Target.of(own))
        found.append(native_footprint(own, prepared, WarmUpLimits()).weights)
    assert found[1] - found[0] == sum(each.nbytes for each in load_file(draft / "model.safetensors").values())


def test_a_draft_model_without_a_head_has_the_vocabulary_of_the_model(tmp_path: Path) -> None:
    draft = EagleModel(LlamaConfig(**SHAPE), own_head=False).write(tmp_path) / "draft"
    change_config(draft, {"draft_vocab_size": 64})
    with pytest.raises(EngineError, match="it has no LM head, and draft_vocab_size is 64, not 331"):
        build_engine(ShardConfig(model_path=str(tmp_path), device="cpu", max_batch_size=4, speculator=str(draft)))


@pytest.mark.parametrize("source", ["mtp", "eagle"])
def test_drafts_are_counted_under_the_name_of_their_source(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = EagleModel(LlamaConfig(**SHAPE)) if source == "eagle" else PredictionLayer(CONFIGS["qwen2"])
    draft = layer.write(tmp_path) / "draft"
    speculator = str(draft) if source == "eagle" else ""
    config = ShardConfig(model_path=str(tmp_path), device="cpu", max_batch_size=4, speculate="3", speculator=speculator)
    engine = build_engine(config)
    assert isinstance(engine, TorchEngine)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))
    assert engine.drafter is not None
    took = engine.drafter.took
    monkeypatch.setattr(engine.drafter, "took", lambda rows, _, began_ahead: took(rows, 0.1, began_ahead=began_ahead))
    driver.admit((7, 1, 9, 3), 12)
    sources = set()
    while (result := driver.step()) is not None:
        sources |= {told.source for told in result.drafting}
    assert source in sources <= {source, "own"}


@pytest.mark.parametrize("shift", [14, -400])
def test_a_draft_model_names_tokens_of_the_vocabulary(shift: int, tmp_path: Path) -> None:
    draft = EagleModel(LlamaConfig(**SHAPE)).write(tmp_path) / "draft"
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + shift}, draft / "model.safetensors")
    with pytest.raises(EngineError, match="d2t of the draft model names tokens outside of the vocabulary of 331"):
        build_engine(ShardConfig(model_path=str(tmp_path), device="cpu", max_batch_size=4, speculator=str(draft)))


def test_images_have_the_same_rotary_positions_in_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").mkdir()
    draft = EagleModel(LlamaConfig(**SHAPE)).write(tmp_path / "text") / "draft"
    vision = VisionModel("qwen3_vl", tmp_path / "model")
    prompt = vision.prompt([picture(70, 45), picture(31, 90)])
    config = ShardConfig(model_path=vision.folder, device="cpu", dtype="float32", speculator=str(draft), speculate="3")
    engine = build_engine(config)
    assert isinstance(engine, TorchEngine)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))
    draft_by(engine, Predicted(MOST))
    model = engine._executor._runner._model
    seen: dict[str, list[torch.Tensor]] = {"forward": [], "predict": []}

    def recorded(name: str, run: Callable[..., torch.Tensor], step: Step, *rest: torch.Tensor) -> torch.Tensor:
        seen[name].append(step.rotary_positions.expand(3, -1))
        return run(step, *rest)

    for name in seen:
        monkeypatch.setattr(model, name, partial(recorded, name, getattr(model, name)))
    stream = driver.admit(prompt.ids, 6, chunk=7, **decoded(engine, prompt))
    driver.run()
    assert stream.tokens == vision.reference(prompt, 6)[1]
    positions, predicted = (torch.cat(found, dim=1)[:, : len(prompt.ids)] for found in seen.values())
    assert positions[0, -1] < len(prompt.ids) - 1
    assert torch.equal(predicted, positions)


def test_an_error_of_the_layer_costs_its_drafts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PredictionLayer(CONFIGS["qwen3_5_text"]).write(tmp_path)
    engine = build_engine(ShardConfig(model_path=str(folder), device="cpu", max_batch_size=4, speculate="8"))
    assert isinstance(engine, TorchEngine)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=512)))
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
