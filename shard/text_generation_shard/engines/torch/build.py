"""Builds the torch engine from the settings of a shard: weights, executor."""

from __future__ import annotations

from dataclasses import replace

import torch

from text_generation_proto.cpus import usable_cpus
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.engines.torch.cpu.executor import CpuExecutor
from text_generation_shard.engines.torch.engine import TorchEngine
from text_generation_shard.engines.torch.kv_cache import CacheShape
from text_generation_shard.engines.torch.memory import keep_freed_memory
from text_generation_shard.engines.torch.model.config import ModelConfig
from text_generation_shard.engines.torch.model.decoder import Decoder
from text_generation_shard.engines.torch.model.parameters import ModelWeights
from text_generation_shard.engines.torch.model.precision import Precision
from text_generation_shard.engines.torch.ops.cpu import CpuOps
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.prepare import Target, prepare
from text_generation_shard.engines.torch.trace import open_trace
from text_generation_shard.engines.torch.weights import load


def build_torch_engine(config: ShardConfig, model_config: ModelConfig) -> Engine:
    """Load the model, or this rank's part of it. Raises EngineError with a one-line message if it cannot be run."""
    # torch counts the cores of its affinity only, not the quota of a container.
    torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), usable_cpus()))
    prepared = prepare(config, model_config, Target.of(config))
    info, grammars, device = prepared.info, prepared.grammars, prepared.target.device
    if device.type == "cuda" or config.world_size > 1:
        from text_generation_shard.engines.torch.cuda.build import build_on_cuda

        return build_on_cuda(config, model_config, info, grammars)
    keep_freed_memory()
    executor = CpuExecutor(
        _decoder(config, model_config, device, prepared.dtype),
        CacheShape(model_config.layers, device, prepared.dtype),
        info.max_sequence_length,
        info.max_slots,
        config.cpu_memory_fraction,
    )
    return TorchEngine(info, executor, grammars, open_trace(config))


@torch.inference_mode()
def _decoder(config: ShardConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Build the decoder of a single rank on a CPU."""
    weights = cpu_weights(model_config, device, dtype)
    load(config, weights.named_parameters(), model_config.quantization)
    weights.process_weights_after_loading()
    weights.pack()
    return Decoder(replace(model_config, quantization=None), weights, CpuOps(), ParallelGroup(TensorParallelRank()))


def cpu_weights(model_config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Return the empty weights of a CPU, which has no quantized products: weights are dequantized while they load."""
    unquantized = replace(model_config, quantization=None)
    return ModelWeights(unquantized, TensorParallelRank(), device, dtype, Precision.uniform(dtype))
