"""Builds the torch engine of a model that transformers runs."""

from __future__ import annotations

from pathlib import Path

import torch

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError
from text_generation_shard.engines.torch.build import check_memory, choose_device, engine_info
from text_generation_shard.engines.torch.cpu.executor import CpuExecutor
from text_generation_shard.engines.torch.engine import TorchEngine
from text_generation_shard.engines.torch.huggingface.check import check_model
from text_generation_shard.engines.torch.huggingface.config import read_config
from text_generation_shard.engines.torch.huggingface.load import load_model
from text_generation_shard.engines.torch.huggingface.model import TransformersModel
from text_generation_shard.engines.torch.kv_cache import CacheShape
from text_generation_shard.engines.torch.memory import keep_freed_memory
from text_generation_shard.engines.torch.trace import open_trace
from text_generation_shard.grammar import load_grammars


def build_huggingface_engine(config: ShardConfig) -> Engine:
    """Load the model. Raises EngineError with a one-line message if it cannot be run."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    model_config = read_config(Path(config.model_path))
    if device.type == "cuda":
        raise EngineError("models of transformers are not served on CUDA yet: --device cpu")
    if config.world_size > 1:
        raise EngineError("models of transformers are not divided over devices: --num-replicas instead of --num-shard")
    dtype = getattr(torch, config.dtype or model_config.dtype)
    check_memory(model_config, dtype.itemsize, device, config.world_size)
    grammars = load_grammars(config.model_path, model_config.eos_token_ids)
    info = engine_info(config, model_config, device, grammars)
    keep_freed_memory()
    model = TransformersModel(load_model(config, model_config, device, dtype))

    def executor() -> CpuExecutor:
        shape = CacheShape(tuple(model.layers), device, dtype)
        return CpuExecutor(
            model,
            shape,
            info.max_sequence_length,
            info.max_slots,
            config.cpu_memory_fraction,
        )

    check_model(model, model_config.vocab_size, executor)
    model.record()
    return TorchEngine(info, executor(), grammars, open_trace(config))
