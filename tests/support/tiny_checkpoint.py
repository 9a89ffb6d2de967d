"""Random checkpoints of a tiny decoder on disk: unquantized, or in FP8 like those of compressed-tensors and ModelOpt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from text_generation_shard.adapters import LoraAdapter
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.parameters import ModelWeights, empty_weights
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.weights.load import load_weights

FP8 = torch.float8_e4m3fn
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED_DYNAMIC: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": ACTIVATIONS | {"strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
"""Config written by llm-compressor's scheme FP8_DYNAMIC."""
MODELOPT_STATIC: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}


def random_tensors(changes: dict[str, Any] | None = None, seed: int = 3) -> dict[str, Tensor]:
    """Return the tensors of CONFIG with changes, in float32, large enough for logits far from uniform."""
    config = CONFIG | (changes or {})
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3 + mean

    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    sizes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    mlp_sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    tensors = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden)}
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = draw(config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for block, biased, shapes in (
            ("self_attn", config.get("attention_bias"), sizes),
            ("mlp", config.get("mlp_bias"), mlp_sizes),
        ):
            for name, shape in shapes.items():
                tensors[f"{layer}{block}.{name}_proj.weight"] = draw(*shape)
                if biased:
                    tensors[f"{layer}{block}.{name}_proj.bias"] = draw(shape[0])
        tensors[f"{layer}input_layernorm.weight"] = draw(hidden, mean=1.0)
        tensors[f"{layer}post_attention_layernorm.weight"] = draw(hidden, mean=1.0)
    tensors["model.norm.weight"] = draw(hidden, mean=1.0)
    return tensors


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], changes: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (changes or {})))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load_for_cuda(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    tp: TensorParallelRank | None = None,
    quantize: str | None = None,
    adapters: Sequence[LoraAdapter] = (),
) -> ModelWeights:
    """Load the checkpoint into the weights of the CUDA path, or a rank's part of it."""
    config = read_model_config(folder, quantize)
    weights = empty_weights(config, tp or TensorParallelRank(), device, dtype, adapters, on_cpu=False)
    load_weights(folder, weights.named_parameters(), config.quantization)
    weights.process_weights_after_loading()
    for place, adapter in enumerate(adapters):
        weights.adapters.change("place", adapter.name, place)  # type: ignore[union-attr]
    return weights


def quantized(tensors: dict[str, Tensor], *, per_row: bool, input_scale: float | None = None) -> dict[str, Tensor]:
    """Quantize the projections to FP8, with weight_scale, and with input_scale if given (different for each projection)."""
    quantized = dict(tensors)
    for name in [name for name in tensors if name.split(".")[-2] in PROJECTIONS and name.endswith(".weight")]:
        weight = tensors[name]
        largest = weight.abs().amax(1, keepdim=True) if per_row else weight.abs().max()
        scale = largest / 448.0
        quantized[name] = (weight / scale).clamp(-448.0, 448.0).to(FP8)
        quantized[f"{name}_scale"] = scale
        if input_scale is not None:
            grown = input_scale * (1 + PROJECTIONS.index(name.split(".")[-2]) / 4)
            quantized[name.removesuffix("weight") + "input_scale"] = torch.tensor(grown)
    return quantized


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `quantized` in float32, multiplied by their scales."""
    return {
        name: tensor.float() * tensors[f"{name}_scale"] if tensor.dtype == FP8 else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }
