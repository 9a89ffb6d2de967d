"""The experts of a checkpoint: one tensor each, or all in one, in MXFP4, and divided among ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_transformers import SHAPE, random_model
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.parameters import empty_weights
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.weights.load import load_weights
from text_generation_shard.engines.torch.weights.parameter import NamedParameters, ParameterShard
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import GptOssMxfp4Format

EXPERTS, INNER = 4, 32
SIZES = SHAPE | {"hidden_size": 64, "num_hidden_layers": 1, "num_experts_per_tok": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=INNER, head_dim=16),
    "mixtral": MixtralConfig(
        **SIZES | {"intermediate_size": INNER, "num_attention_heads": 4}, num_local_experts=EXPERTS
    ),
    "gpt_oss": GptOssConfig(**SIZES | {"intermediate_size": INNER}, num_local_experts=EXPERTS, head_dim=16),
}
CPU = torch.device("cpu")


def loaded(folder: Path, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """Return the parameters of a rank after loading, by name."""
    config = read_model_config(folder)
    weights = empty_weights(config, TensorParallelRank(rank, ranks), CPU, torch.float32, on_cpu=False)
    parameters: NamedParameters = weights.named_parameters()
    load_weights(folder, parameters, config.quantization)
    return {name: part.tensor if isinstance(part, ParameterShard) else part for name, part in parameters.items()}


def saved(name: str, folder: Path, *, original: bool = True) -> Path:
    random_model(CONFIGS[name]).save_pretrained(folder, save_original_format=original)
    return folder


def concatenated(parts: list[Tensor], whole: Tensor) -> Tensor:
    """Return the parts of two ranks as one tensor: along the dimension in which they are smaller, if there is one."""
    first, second = parts
    dims = [dim for dim in range(whole.ndim) if first.shape[dim] != whole.shape[dim]]
    return torch.cat((first, second), dims[0]) if dims else first


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_tensors_of_all_experts_load_as_those_of_each(tmp_path: Path, name: str) -> None:
    each, fused = saved(name, tmp_path / "each"), saved(name, tmp_path / "fused", original=False)
    stored = load_file(fused / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].shape == (EXPERTS, 2 * INNER, 64)
    expected, found = loaded(each), loaded(fused)
    original = load_file(each / "model.safetensors")
    assert expected.keys() == found.keys() == original.keys() - {"lm_head.weight"} | {"lm_head.weight"}
    for parameter, tensor in original.items():
        assert expected[parameter].equal(tensor), parameter
        assert found[parameter].equal(tensor), parameter


def test_experts_in_one_tensor_that_is_not_quantized_count_as_not_quantized(tmp_path: Path) -> None:
    """A GPU would look for the packed weight of each: such experts are not linear layers, which the config would name."""
    formats = []
    for original in (True, False):
        folder = saved("qwen3_moe", tmp_path / str(original), original=original)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
        scheme = read_model_config(folder).quantization
        assert scheme is not None
        assert scheme.format_of("model.layers.0.self_attn.q_proj") is not None
        formats.append(scheme.format_of("model.layers.0.mlp.experts.3.gate_proj"))
    assert formats[0] is not None
    assert formats[1] is None


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_divide_the_inner_values_of_each_expert(tmp_path: Path, name: str) -> None:
    folder = saved(name, tmp_path)
    whole, parts = loaded(folder), [loaded(folder, rank, 2) for rank in range(2)]
    sized = 0
    for parameter, tensor in whole.items():
        if ".experts." in parameter and parameter in parts[1]:
            assert concatenated([part[parameter] for part in parts], tensor).equal(tensor), parameter
            sized += parts[0][parameter].numel() < tensor.numel()
    assert sized >= 2 * EXPERTS
    # One rank adds the bias of the output, which is not divided.
    bias = "model.layers.0.mlp.experts.down_proj_bias"
    assert (bias in parts[0], bias in parts[1]) == (name == "gpt_oss", False)


def test_mxfp4_experts_load_as_their_dequantized_weights(tmp_path: Path) -> None:
    folder = saved("gpt_oss", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    dequantized = dict(tensors)
    for projection in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{projection}"
        experts, inputs, outputs = tensors.pop(name).shape
        stored = {
            "blocks": torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8),
            "scales": torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8),
        }
        tensors |= {f"{name}_{role}": tensor for role, tensor in stored.items()}
        ranges = (slice(0, experts), slice(0, inputs), slice(0, outputs))
        dequantized[name] = GptOssMxfp4Format().dequantize(stored, ranges).contiguous()
    save_file(dequantized, folder / "model.safetensors")
    expected = [loaded(folder), loaded(folder, 1, 2)]
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    for whole, found in zip(expected, (loaded(folder), loaded(folder, 1, 2)), strict=True):
        assert all(found[name].equal(tensor) for name, tensor in whole.items())


def test_a_checkpoint_without_an_expert_is_refused(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EngineError, match=r"no tensor model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight or .*gate_up"):
        loaded(folder)
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(EXPERTS, INNER, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EngineError, match=r"gate_up_proj has shape \[4, 32, 64\], config.json says \[4, 64, 64\]"):
        loaded(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, of 4 experts"),
        ({"num_local_experts": 1 << 20}, "num_local_experts is 1048576, not a whole number from 1 to 4096"),
        ({"mlp_layer_types": [{}]}, "mlp_layer_types must name 1 layers, each dense or sparse"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is not a list of layers"),
    ],
)
def test_wrong_experts_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    config = CONFIGS["qwen3_moe"].to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=message):
        read_model_config(tmp_path)


def test_active_weights_count_the_experts_of_a_token(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"].to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_model_config(tmp_path)
    model = random_model(CONFIGS["qwen3_moe"])
    sizes = {name: weight.numel() for name, weight in model.named_parameters() if "proj" in name or "gate" in name}
    assert found.projection_weights == sum(sizes.values())
    idle = sum(size * 2 // EXPERTS for name, size in sizes.items() if "experts" in name)
    assert found.active_weights == sum(sizes.values()) - idle
