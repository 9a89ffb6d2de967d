"""Fills a model's tensors from a Hugging Face folder of safetensors, straight from the mapped files.

Nothing is ever unpickled: a folder that only holds *.bin is refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_shard.engine import EngineError

DUMMY_STD = 0.02
"""Spread of random weights: transformers' default initializer_range, small enough for finite logits at any depth."""


def load_weights(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill every target from the tensor of its name, converted to its dtype. Raises EngineError in one line."""
    files = _files(folder)
    names_of: dict[Path, list[str]] = {}
    for name in targets:
        if name not in files:
            raise EngineError(f"{folder}: the checkpoint has no tensor {name}")
        names_of.setdefault(files[name], []).append(name)
    for path, names in names_of.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    _fill(targets[name], file.get_tensor(name), name, path)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from None


def fill_dummy(targets: Mapping[str, Tensor]) -> None:
    """Random weights that are the same wherever and however often they are drawn: norms one, the rest N(0, 0.02²)."""
    for name, target in targets.items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            target.copy_(torch.empty(target.shape).normal_(0.0, DUMMY_STD, generator=generator))


def _fill(target: Tensor, tensor: Tensor, name: str, path: Path) -> None:
    if tensor.shape != target.shape:
        raise EngineError(f"{path}: {name} has shape {list(tensor.shape)}, config.json says {list(target.shape)}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise EngineError(f"{path}: {name} is {str(tensor.dtype).removeprefix('torch.')}, a quantized checkpoint")
    target.copy_(tensor)


def _files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor: by the index if there is one, else whatever the *.safetensors hold."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _indexed_files(index)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        hint = ", only pickled weights, which are never loaded: convert them first" if pickled else ""
        raise EngineError(f"{folder} has no *.safetensors{hint}")
    files: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from None
    return files


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{index} is not a safetensors index: {_one_line(error)}") from None
    for path in sorted(set(files.values())):
        if not path.is_file():
            raise EngineError(f"{index} names {path.name}, which does not exist")
    return files


def _unreadable(path: Path, error: Exception) -> EngineError:
    return EngineError(f"{path} cannot be read, is it complete? {_one_line(error)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
