"""The engines by name. Each is imported only when it is used."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from text_generation_common.log import log
from text_generation_common.one_line import one_line
from text_generation_shard.config import ShardConfig, choose_engine
from text_generation_shard.engine import Engine, EngineError
from text_generation_shard.json_object import UnsupportedError

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.models.native.model_config import ModelConfig

ENTRY_POINTS = "text_generation_shard.engines"
"""Entry points of installed packages: functions that build the engine of this name, in place of the one here."""


def build_engine(config: ShardConfig) -> Engine:
    """Build the engine of `config` and load the model, without warm-up. Raises EngineError."""
    name = choose_engine(config.engine, has_gpu=has_gpu(config))
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        build_foreign: Callable[[ShardConfig], Engine] = entry.load()
        return build_foreign(config)
    if name == "echo":
        from text_generation_shard.engines.echo import EchoEngine

        return EchoEngine.build(config)
    if name == "tensorrt-llm":
        from text_generation_shard.engines.tensorrt_llm.build import build

        return build(config)
    choice = choose_code(config)
    import torch

    try:
        if choice.model is None:
            return _build_with_transformers(config, choice)
        from text_generation_shard.engines.torch.build.native import build_native_engine

        return build_native_engine(config, choice.model)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise EngineError(f"the model does not fit in the memory: {one_line(error)}") from error


@dataclass(frozen=True, slots=True)
class CodeChoice:
    """The code that runs a model in the torch engine."""

    model: "ModelConfig | None"
    """The config for the native decoder; None: transformers runs the model."""
    reason: str
    refused: bool = False
    """True: the native decoder knows the model and does not take it, for `reason`."""


def choose_code(config: ShardConfig) -> CodeChoice:
    """Return the code that runs the model in the torch engine. Imports no PyTorch to refuse one. Raises EngineError."""
    choice = _choose_code(config)
    if config.lora_slots and choice.model is None:
        raise EngineError(f"--lora-adapters: only the native decoder serves LoRA adapters; {choice.reason}")
    if config.speculator and choice.model is None:
        raise EngineError(f"--speculator: only the native decoder serves draft models; {choice.reason}")
    if config.mamba_ssm_cache_dtype != "auto" and choice.model is None:
        raise EngineError(f"--mamba-ssm-cache-dtype: only the native decoder has it; {choice.reason}")
    return choice


def _choose_code(config: ShardConfig) -> CodeChoice:
    if find_spec("torch") is None:
        raise EngineError(
            "the torch engine needs PyTorch: pip install 'torch>=2.9' 'safetensors>=0.8' 'regex>=2025.10.22'"
        )
    if not config.model_path:
        raise EngineError("the torch engine needs model_path, a folder with config.json and *.safetensors")
    from text_generation_shard.engines.torch.models.native.config import is_native, read_model_config, read_model_type

    folder = Path(config.model_path)
    if config.model_impl == "transformers":
        return CodeChoice(None, "--model-impl transformers")
    if config.model_impl == "auto" and not is_native(folder):
        return CodeChoice(None, f"the native decoder does not know model_type {read_model_type(folder)}")
    try:
        # Checked before PyTorch is imported, which takes seconds.
        model = read_model_config(folder, config.quantize)
        if model.states is not None and config.world_size > 1 and not model.states.divides(config.world_size):
            raise UnsupportedError(f"{folder}: the native decoder does not divide the layers of {model.model_type}")
    except UnsupportedError as error:
        if config.model_impl == "native":
            raise
        return CodeChoice(None, str(error), refused=True)
    return CodeChoice(model, f"the native decoder knows model_type {model.model_type}")


def _build_with_transformers(config: ShardConfig, choice: CodeChoice) -> Engine:
    """Build the engine of a model that transformers runs; raise both errors in one if it fails too."""
    if choice.refused:
        log.info("transformers runs the model", reason=choice.reason)
    try:
        check_transformers(config)
        from text_generation_shard.engines.torch.build.transformers import build_transformers_engine

        return build_transformers_engine(config)
    except EngineError as error:
        raise both_errors(choice, error) from None


def both_errors(choice: CodeChoice, error: EngineError) -> EngineError:
    """Return the error of transformers, after that of the native decoder if it has one."""
    return EngineError(f"{choice.reason}; by transformers: {error}") if choice.refused else error


def check_transformers(config: ShardConfig) -> None:
    """Raise EngineError if transformers is not installed; call this before the library is imported."""
    if find_spec("transformers") is None:
        from text_generation_shard.engines.torch.models.native.config import read_model_type
        from text_generation_shard.engines.torch.models.native.families import FAMILIES

        folder = Path(config.model_path)
        raise EngineError(
            f"{folder}: model_type {read_model_type(folder)} needs transformers: "
            f"pip install 'transformers>=5.23' 'accelerate>=1.10' (without it: {', '.join(FAMILIES)})"
        )
    # Where the package `kernels` is installed, the library would fetch code from a hub.
    os.environ.setdefault("USE_HUB_KERNELS", "NO")


def has_gpu(config: ShardConfig) -> bool:
    """Return True if a GPU seems usable; loads nothing to find out."""
    return config.device != "cpu" and Path("/dev/nvidiactl").exists()
