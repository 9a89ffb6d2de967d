"""The engines by name. Each is imported only when it is used."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import structlog

from text_generation_shard.config import ShardConfig, choose_engine
from text_generation_shard.engine import Engine, EngineError
from text_generation_shard.json_object import UnsupportedError

log = structlog.get_logger()


def build_engine(config: ShardConfig) -> Engine:
    """Build the engine of `config` and load the model, without warm-up. Raises EngineError."""
    name = choose_engine(config.engine, has_gpu=_has_gpu(config))
    if name == "echo":
        from text_generation_shard.engines.echo import EchoEngine
        from text_generation_shard.engines.echo_self import SelfSchedulingEcho

        return SelfSchedulingEcho.build(config) if config.echo_self_scheduling else EchoEngine.build(config)
    if name == "tensorrt-llm":
        from text_generation_shard.engines.tensorrt_llm.build import build

        return build(config)
    if config.lora_adapters:
        raise EngineError("--lora-adapters: the torch engine does not serve LoRA adapters")
    if find_spec("torch") is None:
        raise EngineError("the torch engine needs PyTorch: pip install 'text-generation-trtllm[torch]'")
    if not config.model_path:
        raise EngineError("the torch engine needs model_path, a folder with config.json and *.safetensors")
    from text_generation_shard.engines.torch.model.config import is_native, read_model_config

    folder = Path(config.model_path)
    if config.model_impl == "transformers" or (config.model_impl == "auto" and not is_native(folder)):
        return _build_with_transformers(config, folder)
    try:
        # Checked before PyTorch is imported, which takes seconds.
        model_config = read_model_config(folder, config.quantize)
    except UnsupportedError as error:
        if config.model_impl == "native":
            raise
        return _build_instead(config, folder, str(error))
    from text_generation_shard.engines.torch.build import build_torch_engine

    return build_torch_engine(config, model_config)


def _build_instead(config: ShardConfig, folder: Path, reason: str) -> Engine:
    """Build the engine of a model that the native code refuses for `reason`; raise both errors in one if it fails."""
    log.info("transformers runs the model", reason=reason)
    try:
        return _build_with_transformers(config, folder)
    except EngineError as error:
        raise EngineError(f"{reason}; by transformers: {error}") from None


def _build_with_transformers(config: ShardConfig, folder: Path) -> Engine:
    if find_spec("transformers") is None:
        from text_generation_shard.engines.torch.model.config import read_model_type
        from text_generation_shard.engines.torch.model.families import FAMILIES

        raise EngineError(
            f"{folder}: model_type {read_model_type(folder)} needs transformers: "
            f"pip install 'text-generation-trtllm[transformers]' (without it: {', '.join(FAMILIES)})"
        )
    # Where the package `kernels` is installed, the library would fetch code from a hub.
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    from text_generation_shard.engines.torch.huggingface.build import build_huggingface_engine

    return build_huggingface_engine(config)


def _has_gpu(config: ShardConfig) -> bool:
    """Return True if a GPU seems usable; loads nothing to find out."""
    return config.device != "cpu" and Path("/dev/nvidiactl").exists()
