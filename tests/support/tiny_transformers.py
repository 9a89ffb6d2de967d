"""Shapes of tiny transformers models, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from text_generation_shard.engines.torch.models.native.families import FAMILIES
from text_generation_shard.engines.torch.models.native.wrappers import WRAPPERS

SHAPE: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # far from uniform logits, so that there are no near ties
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of `config` with random weights, the same each time."""
    torch.manual_seed(5)
    family = FAMILIES.get(config.model_type) or WRAPPERS[config.model_type]
    model = getattr(transformers, family.architecture)(config).eval()
    for name, weight in model.named_parameters():
        # Norms and biases are initialized to ones and zeros, which would hide a mix-up.
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    for name, factor in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(factor, 1.0, 0.3)
        elif name.endswith(("expert_bias", "e_score_correction_bias")):
            torch.nn.init.normal_(factor, 0.0, 0.3)
    return model


def save(model: PreTrainedModel, folder: Path) -> str:
    """Write the checkpoint of `model`; return its folder."""
    model.save_pretrained(folder)
    if model.config.model_type == "olmo_hybrid":
        _as_released(model, folder / "model.safetensors")
    return str(folder)


def _as_released(model: PreTrainedModel, path: Path) -> None:
    """Write the tensors of an OLMo Hybrid as its checkpoints have them: the library divides convolutions into equal parts."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(".conv1d.weight"):
            net = model.get_submodule(name.removesuffix(".conv1d.weight"))
            rows = tensor.split([net.key_dim, net.key_dim, net.value_dim])
            tensors |= {
                name.replace(".conv", f".{each}_conv"): own.clone() for each, own in zip("qkv", rows, strict=True)
            }
            continue
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        if layer is not None and model.config.layer_types[int(layer)] == "linear_attention":
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
