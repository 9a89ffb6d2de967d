"""Folders of LoRA adapters in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from transformers import PreTrainedModel

NOT_CHANGED = ("gate", "router", "shared_expert_gate", "proj", "kv_b_proj")
"""Modules of experts, and of latent attention, that no adapter changes."""


EMBEDDINGS = ("embed_tokens", "embeddings")
"""Names of embeddings."""


def an_adapter(folder: Path, rank: int = 8, **modules: int) -> Path:
    """Write an adapter of zeros that changes these modules, each with its number of inputs."""
    modules = modules or {"q_proj": 64, "v_proj": 64}
    folder.mkdir()
    config = {"r": rank, "lora_alpha": 16, "target_modules": list(modules), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for module, inputs in modules.items():
        name = f"base_model.model.model.layers.0.block.{module}.lora_"
        weights[f"{name}A.weight"] = np.zeros((rank, inputs), np.float32)
        weights[f"{name}B.weight"] = np.zeros((64, rank), np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def projections_of(model: Module) -> dict[str, tuple[int, int]]:
    """Return the shapes of the projections of the layers of a model, by name."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and ".layers." in name and "vision" not in name
        if name.rpartition(".")[2] not in NOT_CHANGED
    }


def vocabulary_of(model: PreTrainedModel) -> tuple[dict[str, tuple[int, int]], dict[str, Tensor]]:
    """Return the shapes of the embedding, transposed, and of the LM head of a model, and their weights, by name."""
    parts = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, head = (next(name for name, each in model.named_modules() if each is part) for part in parts)
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in (embedding, head)}
    rows, width = weights[head].shape
    return {embedding: (width, rows), head: (rows, width)}, weights


def untie(model: PreTrainedModel) -> None:
    """Give the LM head a weight of its own, which a change of the embedding leaves as it is."""
    head = model.get_output_embeddings()
    head.weight = Parameter(head.weight.detach().clone())


def random_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    seed: int,
    *,
    rank: int = 4,
    bases: Mapping[str, Tensor] = MappingProxyType({}),
    **config: object,
) -> dict[str, Tensor]:
    """Write an adapter of these modules; return the changes of their weights.

    With `alpha_pattern` or `use_rslora` in `config` they are scaled as PEFT scales them. Modules named v_proj have rank 3. PEFT
    writes the weights of embeddings and LM heads, `bases`, beside their changes.
    """
    draw = torch.Generator().manual_seed(seed)
    alpha, patterns = 2.0 * rank, config.get("alpha_pattern", {})
    assert isinstance(patterns, dict)
    weights: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for name, (outputs, inputs) in shapes.items():
        last = name.rpartition(".")[2]
        own = 3 if last == "v_proj" else rank
        is_embedding = last in EMBEDDINGS
        a = torch.randn(own, inputs, generator=draw) * (1.0 if is_embedding else inputs**-0.5)
        b = torch.randn(outputs, own, generator=draw) * 0.1
        scale = patterns.get(last, alpha) / (own**0.5 if config.get("use_rslora") else own)
        for side, matrix in (("A", a), ("B", b)):
            key = f"lora_embedding_{side}" if is_embedding else f"lora_{side}.weight"
            weights[f"base_model.model.{name}.{key}"] = matrix
        changes[name] = scale * ((b @ a).t() if is_embedding else b @ a)
        if name in bases:
            weights[f"base_model.model.{name}.base_layer.weight"] = bases[name]
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear", **config}
    settings["rank_pattern"] = {"v_proj": 3}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_tensors(weights, str(folder / "adapter_model.safetensors"))
    return changes


@contextmanager
def merged(model: Module, changes: Mapping[str, Tensor]) -> Iterator[None]:
    """Add the changes of an adapter to the weights of a model for a while."""
    before = {name: model.get_submodule(name).weight.detach().clone() for name in changes}
    with torch.no_grad():
        for name, change in changes.items():
            model.get_submodule(name).weight.add_(change)
        try:
            yield
        finally:
            for name, weight in before.items():
                model.get_submodule(name).weight.copy_(weight)
