"""config.json in the spellings of transformers 4 and 5, and unsupported configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.layers.rope import inverse_frequencies
from text_generation_shard.engines.torch.models.huggingface.library import ALIASES
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.families import FAMILIES
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig
from text_generation_shard.engines.torch.models.native.wrappers import WRAPPERS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def values(changes: dict[str, Any]) -> dict[str, Any]:
    """Return LLAMA with changes; a value of `...` removes the key."""
    return {key: value for key, value in (LLAMA | changes).items() if value is not ...}


def read(folder: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values(changes)))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)


def of(model_type: str, **changes: object) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": ..., "num_key_value_heads": 4, **changes}


def gemma4(**changes: object) -> dict[str, Any]:
    return of("gemma4_text", num_key_value_heads=2, head_dim=8, hidden_size_per_layer_input=0, **changes)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


OLD_ROPE = {"type": "linear", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("spelling", "kind"),
    [
        ({"torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": OLD_ROPE}, "linear"),
        ({"dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": LLAMA3}, "llama3"),
        ({"dtype": "bfloat16", "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, "llama3"),
    ],
    ids=["old checkpoints", "transformers 4", "transformers 5"],
)
def test_spellings_of_transformers(tmp_path: Path, spelling: dict[str, Any], kind: str) -> None:
    config = read(tmp_path, spelling)
    assert (config.dtype, config.ropes[0].theta, config.ropes[0].factor) == ("bfloat16", 5e5, 8.0)
    assert config.ropes[0].type == kind
    assert config.ropes[0].original_max_positions == (
        64 if kind == "llama3" else config.ropes[0].original_max_positions
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    LLAMA3 | {"original_max_position_embeddings": 32},
    YARN,
    YARN | {"truncate": False, "beta_fast": 16.0},
    YARN | {"attention_factor": 1.2},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
]


@pytest.mark.parametrize("parameters", ROPES, ids=lambda parameters: "-".join(map(str, parameters.values())))
def test_frequencies_are_those_of_transformers(tmp_path: Path, parameters: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10_000.0, **parameters}
    # Enough frequencies that some lie in the bands that llama3 and YaRN interpolate.
    reference = LlamaConfig(**values({"architectures": ...}), head_dim=64, rope_parameters=parameters)
    expected, expected_scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](reference)
    frequencies, scale = inverse_frequencies(read(tmp_path, {"rope_parameters": parameters}).ropes[0], head_dim=64)
    assert torch.equal(frequencies, expected)
    assert scale == expected_scale


MIXED = ["sliding_attention", "full_attention"] * 2


def test_yarn_extends_the_original_length(tmp_path: Path) -> None:
    yarn = YARN | {"original_max_position_embeddings": 128}
    assert read(tmp_path, {"rope_parameters": yarn}).max_sequence_length == 512
    assert read(tmp_path, {"rope_parameters": yarn, "max_position_embeddings": 512}).max_sequence_length == 512


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (of("mistral", sliding_window=16), (16,) * 4),
        (of("mistral", sliding_window=None), (None,) * 4),
        (of("mistral"), (4096,) * 4),
        (of("qwen2", sliding_window=16), (None,) * 4),
        (of("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=3), (None, None, None, 16)),
        (of("qwen2", sliding_window=16, use_sliding_window=True), (None,) * 4),
        (of("qwen3", sliding_window=16, use_sliding_window=True, layer_types=MIXED), (16, None, 16, None)),
        (of("smollm3", sliding_window=16, use_sliding_window=True), (None, None, None, 16)),
        (of("smollm3", sliding_window=16, layer_types=MIXED), (None,) * 4),
    ],
    ids=str,
)
def test_sliding_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    model = read(tmp_path, changes)
    assert tuple(layer.window for layer in model.layers) == windows
    token = 2 * model.layers[0].num_kv_heads * model.layers[0].head_dim
    assert model.kept_bytes(itemsize=2) == 524_288 * windows.count(None) * token * 2


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({}, (2, 512)),
        ({"global_head_dim": 16, "num_global_key_value_heads": 1}, (2, 16)),
        ({"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}, (1, 16)),
        ({"per_layer_config": {"03": {"head_dim": 16}}, "attention_k_eq_v": True}, (2, 16)),
        ({"per_layer_config": {}}, (2, 8)),
    ],
)
def test_layers_without_a_window_have_heads_of_their_own(
    tmp_path: Path, changes: dict[str, Any], full: tuple[int, int]
) -> None:
    sliding = LayerShape(4, 2, 8, 512)
    assert read(tmp_path, gemma4(**changes)).layers == (sliding, sliding, sliding, LayerShape(4, *full))


def test_gelu_of_the_first_gemma_checkpoints_is_the_approximation(tmp_path: Path) -> None:
    assert read(tmp_path, of("gemma", hidden_act="gelu")).activation == "gelu_pytorch_tanh"
    assert read(tmp_path, {"hidden_act": "gelu"}).activation == "gelu"


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [
        (2, None, (2,)),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        (2, {"eos_token_id": 7}, (7,)),
        ([2, 3], {}, (2, 3)),
        (..., None, ()),
    ],
)
def test_eos_ids_come_from_generation_config_else_config(
    tmp_path: Path, own: object, generation: dict[str, Any] | None, ids: tuple[int, ...]
) -> None:
    assert read(tmp_path, {"eos_token_id": own}, generation).eos_token_ids == ids


def nemotron_h(**changes: object) -> dict[str, Any]:
    return of("nemotron_h", layers_block_type=["mamba", "attention", "mlp"], **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": ...}, "model_type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "exl2"}}, "quantized checkpoints (exl2)"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32', not a whole number from 1 to 131072"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', not a number from 1e-12 to 0.1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
        (of("phi3", original_max_position_embeddings=1, rope_scaling={"type": "su"}), "is 1: longrope divides"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"full_attention": [1]}}, "must hold an object for each kind"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', not a token id"),
        ({"max_position_embeddings": 1}, "no room for a new token"),
        ({"rope_theta": 1.0000000001}, "rope_theta is 1.0000000001, not a number from 2 to 1e+12"),
        ({"rope_scaling": YARN | {"factor": 1e-9}}, "factor is 1e-09, not a number from 1 to 1e+06"),
        ({"rope_scaling": YARN | {"truncate": 0}}, "truncate is 0, not true or false"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor 4 is not below high_freq_factor 4"),
        ({"rope_parameters": []}, "rope_parameters must be an object"),
        (of("phi3", rope_scaling={"type": "su", "short_factor": [True]}), "short_factor is [True], not a list of 1 to"),
        (of("smollm3", no_rope_layers=[1, 0, 1, None]), "no_rope_layers must have 4 whole numbers"),
        (of("glm", head_dim=8, partial_rotary_factor=0.4), "rotates 3 of 8 dimensions, an odd number"),
        (of("gemma3_text", use_bidirectional_attention=True), "attention to earlier tokens only"),
        (of("gemma4_text"), "hidden_size_per_layer_input is 256: only transformers"),
        (gemma4(num_kv_shared_layers=2), "num_kv_shared_layers is 2"),
        (gemma4(use_bidirectional_attention="all"), "attention to earlier tokens only"),
        (gemma4(enable_moe_block=True), "num_experts is missing"),
        (gemma4(global_head_dim=7), "head_dim 7 is odd"),
        (gemma4(per_layer_config={"4": {}}), "per_layer_config must hold objects for some of 4 layers"),
        (gemma4(per_layer_config={"0": {"hidden_size": 8}}), "per_layer_config: 'hidden_size' is not supported"),
        (of("deepseek_v3", n_group=5), "8 of 256 experts cannot be chosen from 4 of 5 groups"),
        (of("deepseek_v3", n_group=256), "8 of 256 experts cannot be chosen from 4 of 256 groups"),
        (of("deepseek_v3", qk_rope_head_dim=7), "qk_rope_head_dim 7 is odd"),
        (of("deepseek_v3", q_lora_rank=None, attention_bias=True), "attention_bias without q_lora_rank"),
        (of("glm4_moe_lite", mlp_layer_types=["dense", "moe"] * 2), "must name 4 layers, each dense or sparse"),
        (of("deepseek_v3", kv_lora_rank=8192), "kv_lora_rank is 8192, not a whole number from 1 to 4096"),
        (of("qwen2", use_sliding_window=True, layer_types=["full_attention"]), "layer_types must name 4 layers"),
        (of("qwen2", use_sliding_window=True, layer_types=["linear_attention"] * 4), "['linear_attention']"),
        (of("qwen3_next", layer_types=["linear_attention"] * 4), "no layer has attention: models with states alone"),
        (of("qwen3_next", hidden_act="gelu"), "hidden_act 'gelu': convolutions have silu"),
        (nemotron_h(mamba_hidden_act="gelu"), "mamba_hidden_act 'gelu': convolutions have silu"),
        (nemotron_h(mlp_hidden_act="silu"), "mlp_hidden_act 'silu' is not supported, only relu2"),
    ],
    ids=lambda value: None,
)
def test_unsupported_configs_are_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refusal(tmp_path, json.dumps(values(changes)).encode())


@pytest.mark.parametrize("content", [b"{", b"[]", b"\x80"])
def test_a_broken_config_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    refusal(tmp_path, content)


def refusal(folder: Path, config: bytes) -> str:
    (folder / "config.json").write_bytes(config)
    with pytest.raises(EngineError, match=r"^[^\n]*config\.json[^\n]*$") as refused:
        read_model_config(folder)
    return str(refused.value)


REQUIRED = {
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "eos_token_id",
    "dtype",
}


WITH_LAYER_TYPES = ("lfm2", "lfm2_moe", "granitemoehybrid")
"""Families of layers with a state, whose kinds a config.json must have."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_the_config_classes(tmp_path: Path, model_type: str) -> None:
    """Without its optional fields, a config reads as with the values that transformers gives them."""
    required = set(REQUIRED)
    if FAMILIES[model_type].vocab_size is not None:
        required -= {"vocab_size", "num_attention_heads", "max_position_embeddings"}
    known = ALIASES.get(model_type, model_type)
    reference, architecture = AutoConfig.for_model(known), FAMILIES[model_type].architecture
    if architecture not in {wrapper.architecture for wrapper in WRAPPERS.values()}:
        # The library maps Mistral4ForCausalLM to no type, and has no MiMo.
        mapped = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(known, "Mistral4ForCausalLM")
        assert architecture == ("MiMoForCausalLM" if model_type == "mimo" else mapped)
    given = {**reference.to_dict(), "architectures": [architecture]}
    given |= {"model_type": model_type, "dtype": "bfloat16"}
    fixed: dict[str, object] = dict.fromkeys((name for name, _ in FAMILIES[model_type].unsupported), False)
    if model_type in WITH_LAYER_TYPES:
        fixed["layer_types"] = ["conv", "full_attention"] * (reference.num_hidden_layers // 2)
    elif model_type == "nemotron_h":
        fixed["layers_block_type"] = ["linear_attention", "full_attention", "mlp"]
    elif model_type == "deepseek_v2":
        fixed["num_experts_per_tok"] = 6
    elif model_type in ("glm4v_moe_text", "glm4_moe"):  # the default width of heads, 4096 / 96, cannot be rotated
        fixed["head_dim"] = 128
    elif model_type == "olmo_hybrid":
        required |= {name for name in given if name.startswith("linear_")}
    elif model_type == "bamba":
        fixed["attn_layer_indices"] = [3, 5]
    given |= fixed
    required |= fixed.keys()
    (tmp_path / "config.json").write_text(json.dumps(given))
    expected = read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({key: given[key] for key in required if key in given}))
    assert read_model_config(tmp_path) == expected


def test_a_checkpoint_with_an_output_layer_of_its_own_is_not_tied(tmp_path: Path) -> None:
    for head, ties in ((torch.ones(20, 4), True), (torch.zeros(20, 4), False)):
        save_file({"model.embed_tokens.weight": torch.ones(20, 4), "lm_head.weight": head}, tmp_path / "a.safetensors")
        assert read(tmp_path, {"tie_word_embeddings": True}).tie_word_embeddings is ties


@pytest.mark.parametrize(
    ("name", "changes", "both_ways"),
    [
        ("gemma3", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, (True, True, True, True)),
        ("gemma4", {"use_bidirectional_attention": "vision"}, (True, True, True, False)),
        ("gemma4", {}, (False,) * 4),
    ],
)
def test_the_layers_in_which_the_tokens_of_an_image_attend_to_later_ones(
    tmp_path: Path, name: str, changes: dict[str, Any], both_ways: tuple[bool, ...]
) -> None:
    text = values(gemma4() if name == "gemma4" else of("gemma3_text")) | changes
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "text_config": text}))
    layers = read_model_config(tmp_path).layers
    assert tuple(layer.bidirectional_images for layer in layers) == both_ways


@pytest.mark.parametrize("prefix", ["language_model.lm_head", "lm_head"])
def test_the_text_part_of_a_model_has_its_own_head_if_the_checkpoint_has_one(tmp_path: Path, prefix: str) -> None:
    text = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    whole = {"model_type": "mistral3", "text_config": text | {"num_key_value_heads": 4}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_model_config(tmp_path)
    assert (config.model_type, config.dtype, config.tie_word_embeddings) == ("mistral", "bfloat16", True)
    save_file({f"{prefix}.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert not read_model_config(tmp_path).tie_word_embeddings


def test_a_text_part_of_one_class_is_of_its_type_whatever_it_says(tmp_path: Path) -> None:
    text = values(of("gemma3_text")) | {"model_type": "gemma2"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert read_model_config(tmp_path).model_type == "gemma3_text"
