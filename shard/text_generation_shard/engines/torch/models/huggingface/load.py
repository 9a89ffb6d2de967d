"""Loads a Hugging Face model: weights from the safetensors of a folder, or random ones."""

import re
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from text_generation_common.log import log
from text_generation_common.one_line import one_line
from text_generation_common.progress import phase
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.models.huggingface.attention import NAME, paged_attention
from text_generation_shard.engines.torch.models.huggingface.config import TransformersConfig
from text_generation_shard.engines.torch.models.huggingface.dequantize import dequantized_tensors
from text_generation_shard.engines.torch.models.huggingface.library import (
    LibraryConfig,
    LibraryModel,
    register_attention,
    use_attention,
)
from text_generation_shard.engines.torch.models.huggingface.sharding import Division
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint

TEXT_PART = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
"""Prefixes of the tensors of the text part in the checkpoints of models of several modalities."""


def load_model(
    config: ShardConfig,
    model_config: TransformersConfig,
    group: ParallelGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> LibraryModel:
    """Return the model, or this rank's part of it, with our attention. Raises EngineError with a one-line message."""
    register_attention(NAME, paged_attention)
    started = time.monotonic()
    try:
        with warnings.catch_warnings(action="ignore"), phase("loading weights by transformers"):
            if config.load_format == "dummy":
                model = random_model(model_config.model_class, model_config.library, device, dtype)
                if group.tp.world_size > 1:
                    Division(model, group, device).divide()
            else:
                model = _from_checkpoint(Path(config.model_path), model_config, group, device, dtype)
    except (EngineError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 – the library raises errors of many kinds
        raise EngineError(
            f"{config.model_path}: transformers cannot load {model_config.model_class.__name__}: {one_line(error)}"
        ) from None
    use_attention(model, NAME)
    log.info("weights loaded by transformers", seconds=round(time.monotonic() - started, 1))
    return model


def random_model(
    model_class: LibraryModel, config: LibraryConfig, device: torch.device, dtype: torch.dtype
) -> LibraryModel:
    """Return a model with the library's own random weights, the same in every run."""
    torch.manual_seed(0)
    with torch.device(device):
        # The public `from_config` chooses the class by itself.
        return model_class._from_config(config, dtype=dtype).eval()


def _from_checkpoint(
    folder: Path, model_config: TransformersConfig, group: ParallelGroup, device: torch.device, dtype: torch.dtype
) -> LibraryModel:
    checkpoint = Checkpoint(folder)
    scheme = model_config.quantization
    tensors = checkpoint.map(checkpoint.names) if scheme is None else dequantized_tensors(checkpoint, scheme, dtype)
    is_text_class = model_config.library.get_text_config(decoder=True) is model_config.library
    if is_text_class and any(TEXT_PART.match(name) for name in tensors):
        tensors = _text_tensors(tensors, model_config.base_name)
        # The checkpoint decides: the config of the whole model and that of its text part may differ.
        model_config.library.tie_word_embeddings = "lm_head.weight" not in tensors
    if quantized := [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.itemsize == 1]:
        kind = str(tensors[quantized[0]].dtype).removeprefix("torch.")
        raise EngineError(f"{folder}: {quantized[0]} is {kind}, and config.json has no quantization_config")
    is_whole = group.tp.world_size == 1
    loads_on_device = is_whole and device.type != "cpu" and find_spec("accelerate") is not None
    on_device = {"device_map": {"": device}} if loads_on_device else {}
    model = loaded(folder, model_config.model_class, model_config.library, tensors, dtype, **on_device)
    if not is_whole:
        # The parameters are still mapped files: a rank reads its part.
        Division(model, group, device).divide()
    return own_memory(model, device)


def loaded(
    folder: Path,
    model_class: LibraryModel,
    config: LibraryConfig,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    **on_device: object,
) -> LibraryModel:
    """Return a model of a class of the library with the tensors of a checkpoint. Raises EngineError, naming a tensor."""
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the error that it raises otherwise names no tensor
        **on_device,
    )
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, shape = mismatched[0]
        raise EngineError(f"{folder}: {name} has shape {list(stored)}, config.json says {list(shape)}")
    if missing := sorted(info["missing_keys"]):
        raise EngineError(f"{folder}: the checkpoint has no tensor {missing[0]}")
    return model


def own_memory(model: LibraryModel, device: torch.device) -> LibraryModel:
    """Return the model on the device, in memory of its own: on a CPU a parameter may still be the mapped file."""
    if device.type == "cpu":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model.to(device).eval()


def _text_tensors(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of the text part under the names of a text model, whose base is `prefix`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inner = TEXT_PART.sub("", name)
        if inner.startswith("lm_head."):
            found[inner] = tensor
        elif inner != name:
            found[f"{prefix}.{inner}"] = tensor
    return found
