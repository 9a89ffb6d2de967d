"""Builds the torch engine of a model that transformers runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog
import torch

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError, EngineInfo
from text_generation_shard.engines.torch.build import check_memory, choose_device, engine_info
from text_generation_shard.engines.torch.cpu.executor import CpuExecutor
from text_generation_shard.engines.torch.engine import TorchEngine
from text_generation_shard.engines.torch.executor import Executor
from text_generation_shard.engines.torch.huggingface.check import CHUNK, WINDOW, check_model
from text_generation_shard.engines.torch.huggingface.config import TransformersConfig, read_config
from text_generation_shard.engines.torch.huggingface.load import load_model
from text_generation_shard.engines.torch.huggingface.model import TransformersModel
from text_generation_shard.engines.torch.kv_cache import CacheShape
from text_generation_shard.engines.torch.memory import keep_freed_memory
from text_generation_shard.engines.torch.trace import open_trace
from text_generation_shard.grammar import load_grammars

log = structlog.get_logger()


def build_huggingface_engine(config: ShardConfig) -> Engine:
    """Load the model. Raises EngineError with a one-line message if it cannot be run."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    model_config = read_config(Path(config.model_path))
    if config.world_size > 1:
        raise EngineError("models of transformers are not divided over devices: --num-replicas instead of --num-shard")
    dtype = getattr(torch, config.dtype or model_config.dtype)
    check_memory(model_config, dtype.itemsize, device, config.world_size)
    grammars = load_grammars(config.model_path, model_config.eos_token_ids)
    info = engine_info(config, model_config, device, grammars)
    on_cuda = device.type == "cuda"
    model, executor = (_cuda_executors if on_cuda else _cpu_executors)(config, model_config, info, dtype)
    if model.keeps_states and on_cuda:
        raise model.refusal("its layers with a state run on CPU only")
    model.record()
    chunks = [layer.chunk for layer in model.layers if layer.chunk is not None]
    if chunks and on_cuda and min(chunks) < info.max_sequence_length:
        # Within the first chunk, it makes no difference.
        log.info("sequences end with the first chunk of attention", tokens=min(chunks))
        info = replace(info, max_sequence_length=min(chunks))
    if on_cuda:
        _check_and_swap(model, model_config.vocab_size, executor)
    else:
        check_model(model, model_config.vocab_size, executor, (WINDOW, CHUNK))
    model.record()
    return TorchEngine(replace(info, keeps_states=model.keeps_states), executor(), grammars, open_trace(config))


def _check_and_swap(model: TransformersModel, vocab_size: int, executor: Callable[[], Executor]) -> None:
    """Check the model with faster parts; without them, if it is wrong with them."""
    from text_generation_shard.engines.torch.huggingface.swaps import restorer, swap_parts

    restore = restorer(model.library)
    try:
        check_model(model, vocab_size, executor, (WINDOW,), lambda: swap_parts(model.library))
    except EngineError as error:
        restore()
        check_model(model, vocab_size, executor, (WINDOW,))
        log.warning("no parts are replaced", reason=str(error))


def _cpu_executors(
    config: ShardConfig, model_config: TransformersConfig, info: EngineInfo, dtype: torch.dtype
) -> tuple[TransformersModel, Callable[[], Executor]]:
    """Load the model; return it, and a function that builds an executor for it as it is recorded."""
    keep_freed_memory()
    device = torch.device(info.device)
    model = TransformersModel(load_model(config, model_config, device, dtype))

    def executor() -> Executor:
        shape = CacheShape(tuple(model.layers), device, dtype)
        return CpuExecutor(model, shape, info.max_sequence_length, info.max_slots, config.cpu_memory_fraction)

    return model, executor


def _cuda_executors(
    config: ShardConfig, model_config: TransformersConfig, info: EngineInfo, dtype: torch.dtype
) -> tuple[TransformersModel, Callable[[], Executor]]:
    """Do the same as `_cpu_executors` on a GPU."""
    from text_generation_shard.engines.torch.attention.chunks import FLASHINFER_HEAD_DIMS
    from text_generation_shard.engines.torch.cuda.build import prepare_device
    from text_generation_shard.engines.torch.cuda.device_memory import DeviceMemory
    from text_generation_shard.engines.torch.cuda.executor import CudaExecutor
    from text_generation_shard.engines.torch.cuda.runner import Runner
    from text_generation_shard.engines.torch.ops.triton import TritonKernels
    from text_generation_shard.engines.torch.parallel.group import join_group

    device = torch.device(info.device)
    prepare_device(device, dtype)
    model = TransformersModel(load_model(config, model_config, device, dtype), FLASHINFER_HEAD_DIMS)
    group = join_group(config, device)
    memory = DeviceMemory(device, config.cuda_memory_fraction)

    def executor() -> Executor:
        torch.cuda.empty_cache()
        shape = CacheShape(tuple(model.layers), device, dtype)
        kernels = TritonKernels(shape, model.rules, info.vocab_size, info.max_slots, fused_tokens=0)
        runner = Runner(model, kernels, group, shape, info.max_slots, info.max_sequence_length)
        return CudaExecutor(runner, memory, group, shape, info.max_slots)

    return model, executor
