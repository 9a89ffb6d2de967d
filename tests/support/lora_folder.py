"""Folders of LoRA adapters in PEFT's format, whose matrices are zero."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file


def an_adapter(folder: Path, rank: int = 8, **modules: int) -> Path:
    """Write an adapter that changes these modules, each with its number of inputs."""
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
