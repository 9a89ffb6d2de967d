"""Builds the engine of a GPU, or of one rank of a tensor-parallel group."""

from __future__ import annotations

import torch

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError, EngineInfo
from text_generation_shard.engines.torch.cuda.device_memory import DeviceMemory
from text_generation_shard.engines.torch.cuda.executor import CudaExecutor
from text_generation_shard.engines.torch.cuda.runner import Runner
from text_generation_shard.engines.torch.cuda.worker import TPWorker
from text_generation_shard.engines.torch.engine import TorchEngine
from text_generation_shard.engines.torch.kv_cache import CacheShape
from text_generation_shard.engines.torch.model.config import ModelConfig
from text_generation_shard.engines.torch.model.decoder import Decoder
from text_generation_shard.engines.torch.model.parameters import ModelWeights
from text_generation_shard.engines.torch.ops.device import DeviceOps
from text_generation_shard.engines.torch.ops.interface import Kernels
from text_generation_shard.engines.torch.parallel.follower import FollowerEngine
from text_generation_shard.engines.torch.parallel.group import join_group
from text_generation_shard.engines.torch.trace import open_trace
from text_generation_shard.engines.torch.weights import load
from text_generation_shard.grammar import Grammars


def prepare_device(device: torch.device, dtype: torch.dtype) -> None:
    """Make `device` the one of this thread. Raises EngineError if it cannot compute in `dtype`."""
    if device.type != "cuda":
        return
    if dtype == torch.float32:
        raise EngineError("dtype float32 is not served on CUDA: --dtype bfloat16 or float16")
    torch.cuda.set_device(device)
    # Split-K products add their parts in float32: in bfloat16 the logits of a small model are 10 % less accurate.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # Graphs cannot be captured on the default stream; one thread does all work of the engine, on this stream.
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@torch.inference_mode()
def build_on_cuda(
    config: ShardConfig, model_config: ModelConfig, info: EngineInfo, grammars: Grammars | None
) -> Engine:
    """Build the engine of rank 0, or of a follower. A group on CPUs uses the reference kernels: slow, but the same results."""
    device, dtype = torch.device(info.device), getattr(torch, info.dtype)
    prepare_device(device, dtype)
    group = join_group(config, device)
    weights = ModelWeights(model_config, group.tp, device, dtype)
    load(config, weights.named_parameters(), model_config.quantization)
    weights.process_weights_after_loading()
    shape = CacheShape(weights.layer_shapes, device, dtype)
    kernels = _kernels(model_config, shape, info.max_slots)
    decoder = Decoder(model_config, weights, DeviceOps(kernels, group, dtype), group)
    runner = Runner(decoder, kernels, group, shape, info.max_slots, info.max_sequence_length)
    on_cuda = device.type == "cuda"
    memory = DeviceMemory(device, config.cuda_memory_fraction if on_cuda else config.cpu_memory_fraction)
    if config.rank > 0:
        return FollowerEngine(info, config.rank, group.follower, TPWorker(runner, memory, device))
    executor = CudaExecutor(runner, memory, group, shape, info.max_slots)
    return TorchEngine(info, executor, grammars, open_trace(config))


def _kernels(config: ModelConfig, shape: CacheShape, max_slots: int) -> Kernels:
    if shape.device.type == "cpu":
        from text_generation_shard.engines.torch.ops.reference import ReferenceKernels

        return ReferenceKernels(config.attention_scale, config.attention_softcap)
    from text_generation_shard.engines.torch.ops.triton import TritonKernels

    rules = [(config.attention_scale, config.attention_softcap)] * config.num_layers
    return TritonKernels(shape, rules, config.vocab_size, config.hidden_size, max_slots)
