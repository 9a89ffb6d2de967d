"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

Everything is checked before the model is loaded. Features that an engine would ignore are refused: trained biases,
embeddings and whole layers, DoRA, scales that differ between modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from text_generation_common.lora import AdapterSource, parse_adapters
from text_generation_common.model_files import ModelFileError, find_file
from text_generation_common.one_line import one_line
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.json_object import JsonObject

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 1024
"""Limit of `r`, and of the rank of each matrix."""
FROM_HIDDEN = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"})
"""Modules whose input is the hidden state."""
REFUSED = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "trained layers beside the adapter (modules_to_save) are not supported",
    "alpha_pattern": "a lora_alpha for each module (alpha_pattern) is not supported",
    "layers_pattern": "layers_pattern is not supported",
    "lora_bias": "trained biases (lora_bias) are not supported",
}
"""Keys of adapter_config.json that must be absent or empty."""

_WEIGHT = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_LAYER = re.compile(r"\.layers\.(\d{1,6})\.")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that was checked."""

    name: str
    folder: Path
    rank: int
    """The largest of its modules."""
    modules: frozenset[str]
    """Last parts of the names of the modules that it changes, such as `q_proj`."""


def read_adapters(config: ShardConfig) -> tuple[LoraAdapter, ...]:
    """Return the adapters of the settings, checked against the model's config.json. Raises EngineError."""
    sources = parse_adapters(config.lora_adapters)
    if not sources:
        return ()
    model = JsonObject.read(Path(config.model_path)).decoder()
    return tuple(_read(source, config, model) for source in sources)


def _read(source: AdapterSource, config: ShardConfig, model: JsonObject) -> LoraAdapter:
    folder = Path(source.source)
    try:
        settings = JsonObject.read(folder, CONFIG)
    except (FileNotFoundError, NotADirectoryError):
        raise EngineError(f"the LoRA adapter {source.name}: {folder} has no {CONFIG}") from None
    settings = settings.advising(f"needed by the LoRA adapter {source.name}")
    kind, bias = settings.optional_text("peft_type") or "LORA", settings.optional_text("bias") or "none"
    if kind != "LORA":
        raise settings.error(f"peft_type is {kind}, not LORA")
    if bias != "none":
        raise settings.error(f"bias is {bias}: trained biases are not supported")
    for key, problem in REFUSED.items():
        if settings.get(key):
            raise settings.error(problem)
    if not settings.get("target_modules"):
        raise settings.error("target_modules is missing or empty")
    rank = settings.count("r")
    if rank > MAX_RANK:
        raise settings.error(f"r is {rank}, more than {MAX_RANK}")
    settings.number("lora_alpha")
    base = settings.optional_text("base_model_name_or_path")
    if base is not None and config.model_id and base != config.model_id:
        log.warning("the LoRA adapter was trained on another model", adapter=source.name, trained_on=base)
    return _with_weights(source.name, folder, rank, model)


def _with_weights(name: str, folder: Path, rank: int, model: JsonObject) -> LoraAdapter:
    path = folder / WEIGHTS
    hidden = model.count("hidden_size") if "hidden_size" in model else None
    layers = model.count("num_hidden_layers") if "num_hidden_layers" in model else None
    modules: dict[str, set[str]] = {}
    for key, shape in _shapes(folder).items():
        found = _WEIGHT.fullmatch(key)
        if found is None:
            raise EngineError(f"{path}: {key} is not a weight of a LoRA adapter that can be served")
        module = found["module"].rpartition(".")[2]
        ranked, width = shape if found["side"] == "A" else shape[::-1]
        rank = max(rank, ranked)
        if rank > MAX_RANK:
            raise EngineError(f"{path}: the rank of {key} is {ranked}, more than {MAX_RANK}")
        if hidden is not None and found["side"] == "A" and module in FROM_HIDDEN and width != hidden:
            raise EngineError(f"{path}: {key} is for a model with hidden_size {width}, and this one has {hidden}")
        layer = _LAYER.search(key)
        if layers is not None and layer is not None and int(layer[1]) >= layers:
            raise EngineError(f"{path}: {key} is for a model with more layers than the {layers} of this one")
        modules.setdefault(found["module"], set()).add(found["side"])
    if not modules:
        raise EngineError(f"{path} holds no weights")
    for module, sides in modules.items():
        if sides != {"A", "B"}:
            raise EngineError(f"{path}: {module} has lora_{min(sides)} only: copy or download the folder again")
    return LoraAdapter(name, folder.absolute(), rank, frozenset(module.rpartition(".")[2] for module in modules))


def _shapes(folder: Path) -> Mapping[str, Sequence[int]]:
    """Return the shapes of the matrices in the header of a safetensors file. Raises EngineError."""
    from safetensors import SafetensorError, safe_open  # an engine brings it; without adapters none is needed

    try:
        path = find_file(folder, WEIGHTS)
        with safe_open(path, framework="np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 - it has no other iterator
    except FileNotFoundError:
        raise EngineError(f"{folder} has no {WEIGHTS}: no other format of adapters is loaded") from None
    except ModelFileError as error:
        raise EngineError(str(error)) from None
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path} is not a safetensors file: {one_line(error)}") from None
    for key, shape in shapes.items():
        if len(shape) != 2 or 0 in shape:
            raise EngineError(f"{path}: {key} is not a matrix")
    return shapes
