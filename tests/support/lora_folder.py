"""Folders of LoRA adapters in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from torch import Tensor
from torch.nn import Linear, Module

NOT_CHANGED = ("gate", "router", "shared_expert_gate", "proj", "kv_b_proj")
"""Modules of experts, and of latent attention, that no adapter changes."""


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


def random_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], seed: int, *, rank: int = 4, **config: object
) -> dict[str, Tensor]:
    """Write an adapter of these modules; return the changes of their weights.

    With `alpha_pattern` or `use_rslora` in `config` they are scaled as PEFT scales them. Modules named v_proj have rank 3.
    """
    draw = torch.Generator().manual_seed(seed)
    alpha, patterns = 2.0 * rank, config.get("alpha_pattern", {})
    assert isinstance(patterns, dict)
    weights: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for name, (outputs, inputs) in shapes.items():
        last = name.rpartition(".")[2]
        own = 3 if last == "v_proj" else rank
        a = torch.randn(own, inputs, generator=draw) * inputs**-0.5
        b = torch.randn(outputs, own, generator=draw) * 0.1
        scale = patterns.get(last, alpha) / (own**0.5 if config.get("use_rslora") else own)
        weights[f"base_model.model.{name}.lora_A.weight"] = a
        weights[f"base_model.model.{name}.lora_B.weight"] = b
        changes[name] = scale * (b @ a)
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear", **config}
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
