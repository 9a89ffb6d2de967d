"""Families of models that transformers runs in the torch engine: tiny random models of them, for parity tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of all families; a config takes those that it has."""
GPT_SIZES = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERTS = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}


@dataclass(frozen=True)
class Family:
    """A family: the models that people know, and what differs from SIZES in its tiny config."""

    models: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    features: str = ""
    """Differences to the structure of Llama."""
    always: bool = False
    """Tested in `make test`, not only in `make test-all`."""


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 2 and 3", always=True),
    "gemma3_text": Family("Gemma 3", features="norms around, two rotations, windows in most layers", always=True),
    "gemma4_text": Family(
        "Gemma 4",
        {
            **EXPERTS,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 0,
            "enable_moe_block": True,
            "top_k_experts": 2,
        },
        features="head sizes by layer, experts beside a dense MLP",
        always=True,
    ),
    "gpt_oss": Family("gpt-oss", EXPERTS, features="sinks, experts with biases", always=True),
    "qwen3_moe": Family(
        "Qwen3-MoE", EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []}, "experts", always=True
    ),
    "glm4_moe": Family("GLM-4.5 to 4.7", SHARED_EXPERTS, "sigmoid router, shared experts", always=True),
    "deepseek_v3": Family("DeepSeek V3, Kimi K2", SHARED_EXPERTS | LATENT, "latent attention", always=True),
    "qwen3_5_text": Family("Qwen3.5 to 3.8", LINEAR, "gated delta nets in three of four layers", always=True),
    "qwen3_5_moe_text": Family("Qwen3.5-MoE", LINEAR | SHARED_EXPERTS, "gated delta nets, experts"),
    "qwen3_next": Family(
        "Qwen3-Next",
        LINEAR | SHARED_EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        "gated delta nets, experts",
    ),
    "lfm2": Family(
        "LFM2",
        {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_key_value_heads": 2},
        "short convolutions",
    ),
    "olmo_hybrid": Family("OLMo Hybrid", LINEAR, "gated delta nets"),
    "phi3": Family("Phi-3, Phi-4", features="fused projections", always=True),
    "gpt2": Family("GPT-2", GPT_SIZES, "LayerNorm, learned positions", always=True),
    "cohere2": Family("Command R7B, Command A", features="parallel blocks, layers without rotation", always=True),
}


def tiny_config(model_type: str, changes: Mapping[str, Any]) -> PretrainedConfig:
    """Return a config of `model_type` with the sizes that it has."""
    config_class = CONFIG_MAPPING[model_type]
    fields: set[str] = set()
    for base in config_class.__mro__:
        fields |= set(getattr(base, "__annotations__", {}))
    return config_class(**{name: value for name, value in (SIZES | dict(changes)).items() if name in fields})


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of `config` with random weights, the same each time."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for weight in model.parameters():
        # Norms and biases are initialized to ones and zeros, which would hide a mix-up.
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0.0, 0.08)
        else:
            weight.data += torch.randn_like(weight) * 0.1
    return model


def write_model(model: PreTrainedModel, folder: Path) -> str:
    """Write the checkpoint of `model`; return its folder."""
    model.save_pretrained(folder)
    return str(folder)
