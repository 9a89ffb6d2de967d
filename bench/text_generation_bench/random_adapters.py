"""Random LoRA adapters for a model of the native decoder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.parameters import empty_weights
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.weights.load import part_of


def write_adapters(model: Path, folder: Path, count: int, rank: int, *, vocabulary: bool = False) -> str:
    """Write adapters of all dense projections of the layers; return the setting that names them `a0`, `a1`, …

    `vocabulary`: they change the embedding and the LM head too.
    """
    if not count:
        return ""
    with torch.inference_mode():
        weights = empty_weights(
            read_model_config(model), TensorParallelRank(), torch.device("meta"), torch.bfloat16, on_cpu=True
        )
    parameters = {name: part_of(parameter).shape for name, parameter in weights.named_parameters().items()}
    shapes = {
        name.removesuffix(".weight"): shape
        for name, shape in parameters.items()
        if name.endswith("_proj.weight") and ".experts." not in name
    }
    embedding = weights.embedding.shape
    if vocabulary:
        shapes["lm_head"] = embedding
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    for seed in range(count):
        draw, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
        for name, shape in shapes.items():
            key = f"base_model.model.{name}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(rank, shape[1], generator=draw).bfloat16() * shape[1] ** -0.5
            tensors[f"{key}B.weight"] = torch.randn(shape[0], rank, generator=draw).bfloat16() * 0.01
        if vocabulary:
            key = "base_model.model.model.embed_tokens.lora_embedding_"
            tensors[f"{key}A"] = torch.randn(rank, embedding[0], generator=draw).bfloat16()
            tensors[f"{key}B"] = torch.randn(embedding[1], rank, generator=draw).bfloat16() * 0.01
        own = folder / f"a{seed}"
        own.mkdir()
        (own / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, own / "adapter_model.safetensors")
    return ",".join(f"a{seed}={folder / f'a{seed}'}" for seed in range(count))
