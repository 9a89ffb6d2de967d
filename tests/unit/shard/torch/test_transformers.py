"""Tiny random checkpoints that transformers runs give the same float32 results in the engine as transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_driver import Driver, Stream
from full_grid import full
from model_families import FAMILIES, SHARED_EXPERTS, SIZES, random_model, tiny_config, write_model
from safetensors.torch import load_file, save_file
from tiny_quantized import quantized_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.json_object import UnsupportedError

NEW_TOKENS = 12
LENGTHS = (29, 1, 65)
SMALL = {"max_batch_size": 6, "num_threads": 1}
MROPE = ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_5_vl_text", "glm4v_moe_text")
"""Text parts with positions in three dimensions."""
LAST_STEPS = {"logits_scaling": 3.0, "output_multiplier": 0.6, "final_logit_softcapping": 2.5}
NAMES = [name if family.always else full(name) for name, family in FAMILIES.items()]


def build(folder: str, **changes: object) -> Engine:
    settings = {"model_path": folder, "device": "cpu", "model_impl": "transformers", **SMALL, **changes}
    return build_engine(ShardConfig(**settings))  # type: ignore[arg-type]


def check(model: PreTrainedModel, stream: Stream) -> None:
    """Check the prompt's logprobs and the greedy tokens of a sequence."""
    assert stream.failure is None
    prompt = stream.prompt
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *stream.tokens]]), use_cache=False).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == stream.tokens
    expected = logits.log_softmax(-1)[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    served = torch.tensor(stream.prompt_logprobs[0][1:])
    assert (served - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(tiny_config(name, FAMILIES[name].changes))
    engine = build(write_model(model, tmp_path, name))
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=2048)))
    prompts = [tuple(torch.randint(3, SIZES["vocab_size"], (length,)).tolist()) for length in LENGTHS]
    expected = []
    for prompt in prompts:
        alone = driver.admit(prompt, NEW_TOKENS, prompt_logprobs=True)
        driver.run()
        expected.append(alone.tokens)
        check(model, alone)
    streams = [driver.admit(prompt, NEW_TOKENS, chunk=32) for prompt in prompts]
    driver.step()
    resumed = driver.preempt(streams[0])
    driver.run()
    streams[0].tokens += resumed.tokens
    assert [stream.tokens for stream in streams] == expected, "batched, in chunks, preempted"
    owner = driver.admit(prompts[-1], 1)
    checkpoint = driver.keep_state(owner, 48) if driver.has_states else None
    driver.run()
    reused = {"shared": owner.blocks[:3], "computed_tokens": 48, "checkpoint": checkpoint}
    sharing = driver.admit(prompts[-1], NEW_TOKENS, **reused)
    driver.run()
    assert sharing.tokens == expected[-1], "prefix reused"


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (
            "falcon",
            {"num_kv_heads": 4},
            "FalconForCausalLM is not served .* attention and cache: TypeError: unsupported",
        ),
        ("doge", {}, "DogeForCausalLM is not served"),
        ("gptj", {"n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8}, "GPTJForCausalLM is not served"),
        ("bert", {}, "BertLMHeadModel is not served"),
        ("gpt_neox", {"max_position_embeddings": 63}, "a context of 63 tokens is shorter than the 64"),
    ],
)
def test_models_that_would_be_wrong_are_refused_by_name(
    name: str, changes: dict[str, object], problem: str, tmp_path: Path
) -> None:
    folder = write_model(random_model(tiny_config(name, changes)), tmp_path)
    with pytest.raises(EngineError, match=problem) as refusal:
        build(folder)
    assert "\n" not in str(refusal.value)


def test_a_window_that_only_the_mask_has_is_found(tmp_path: Path) -> None:
    config = tiny_config("phimoe", {"num_local_experts": 4, "sliding_window": 200})
    with pytest.raises(EngineError, match=r"PhimoeForCausalLM is not served .* logits differ"):
        build(write_model(random_model(config), tmp_path))


@pytest.mark.parametrize(
    ("model_type", "text_type", "vision"),
    [
        ("mistral3", "ministral3", {"image_size": 28, "patch_size": 14}),
        ("llama4", "llama4_text", {"image_size": 28, "patch_size": 14, "vision_output_dim": 32}),
        ("qwen3_vl", "qwen3_vl_text", {"depth": 1, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}),
        ("granite_docling", "granite_docling_text", {"out_hidden_size": 64}),
        ("muse_glimmer", "muse_glimmer_text", {}),
        ("glm4v_moe", "glm4v_moe_text", {"depth": 1, "out_hidden_size": 64}),
        ("minimax_m3_vl", "minimax_m3_vl_text", {}),
        full("mllama", "mllama_text_model", {"image_size": 28, "patch_size": 14}),
        full("qwen3_vl_moe", "qwen3_vl_moe_text", {"depth": 1, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}),
        full("qwen2_5_vl", "qwen2_5_vl_text", {"depth": 1, "out_hidden_size": 64}),
    ],
)
def test_the_text_part_of_a_model_of_images_is_served(
    model_type: str, text_type: str, vision: dict[str, object], tmp_path: Path
) -> None:
    """Models differ in the names of tensors, in the classes for text, and in steps that only the whole model takes.

    Such steps are a scale or a cap of the logits, and the merge of the weights of single experts.
    """
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
    own = {"rope_parameters": rope} if text_type in MROPE else LAST_STEPS
    changes = FAMILIES[text_type].changes if text_type in FAMILIES else SHARED_EXPERTS | own
    text = tiny_config(text_type, changes).to_dict()
    whole = CONFIG_MAPPING[model_type](text_config=text, vision_config=sizes | vision)
    model = random_model(whole, AutoModelForImageTextToText)
    engine = build(write_model(model, tmp_path))
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=1024)))
    stream = driver.admit(range(5, 34), 6, prompt_logprobs=True)
    driver.run()
    check(model, stream)


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_model(random_model(tiny_config("gpt2", FAMILIES["gpt2"].changes)), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"n_positions": 128}))
    with pytest.raises(EngineError, match=r"wpe\.weight has shape \[256, 64\], config\.json says \[128, 64\]"):
        build(folder)


@pytest.mark.parametrize("family", ["qwen3_moe", full("glm4_moe")])
def test_quantized_weights_are_dequantized(family: str, tmp_path: Path) -> None:
    folder, dense_folder = tmp_path / "quantized", tmp_path / "dense"
    for each in (folder, dense_folder):
        write_model(random_model(tiny_config(family, FAMILIES[family].changes)), each)
    config, stored, dense = quantized_model(load_file(folder / "model.safetensors"))
    assert len(stored) > len(dense)
    save_file(stored, folder / "model.safetensors")
    save_file(dense, dense_folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    engine = build(str(folder))
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=1024)))
    stream = driver.admit(range(5, 40), 1, prompt_logprobs=True)
    driver.run()
    check(AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.float32), stream)


def test_quantized_weights_without_a_config_of_them_are_refused(tmp_path: Path) -> None:
    folder = write_model(random_model(tiny_config("gpt2", FAMILIES["gpt2"].changes)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("h.0.mlp.c_fc.weight"))
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"c_fc\.weight is int8, and config\.json has no quantization_config"):
        build(folder)


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("gpt2", {"num_labels": 1 << 22}, "num_labels is 4194304, above 32768"),
        ("cohere2", {"rope_theta": 1.0000000001}, "rope_theta is 1.0000000001, not a number from 2 to"),
        ("cohere2", {"rope_parameters": {"rope_type": "yarn", "factor": -4.0}}, "rope_parameters.factor is -4.0, not"),
        ("olmo3", {"rope_parameters": {"full_attention": {"factor": True}}}, "full_attention.factor is True, not"),
    ],
)
def test_a_config_with_an_absurd_number_is_refused(
    tmp_path: Path, model_type: str, values: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | values))
    with pytest.raises(EngineError, match=message):
        build(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [{"hidden_act": "relu2"}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}],
)
def test_auto_falls_back_to_transformers(
    changes: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model(tiny_config("llama", changes))
    folder = write_model(model, tmp_path)
    with pytest.raises(UnsupportedError, match=r"is not supported, only"):
        build(folder, model_impl="native")
    engine = build(folder, model_impl="auto")
    assert "transformers runs the model" in capsys.readouterr().out
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=1024)))
    stream = driver.admit(range(5, 34), 6, prompt_logprobs=True)
    driver.run()
    check(model, stream)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"hidden_act": "none of them"}))
    with pytest.raises(EngineError, match=r"is not supported, only .*; by transformers: .* 'none of them'"):
        build(folder, model_impl="auto")


def test_auto_prefers_the_native_code(tmp_path: Path) -> None:
    folder = write_model(random_model(tiny_config("llama", {})), tmp_path)
    assert build(folder, model_impl="auto").info.model_type == "llama"
