"""Builds the torch engine of a model that transformers runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog
import torch

from text_generation_proto.cpus import usable_cpus
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError, EngineInfo
from text_generation_shard.engines.torch.cpu.executor import CpuExecutor
from text_generation_shard.engines.torch.engine import TorchEngine
from text_generation_shard.engines.torch.executor import Executor
from text_generation_shard.engines.torch.huggingface.check import TOKENS, WINDOW, check_model
from text_generation_shard.engines.torch.huggingface.config import TransformersConfig, read_config
from text_generation_shard.engines.torch.huggingface.load import load_model
from text_generation_shard.engines.torch.huggingface.model import TransformersModel
from text_generation_shard.engines.torch.huggingface.sharding import divide
from text_generation_shard.engines.torch.kv_cache import CacheShape
from text_generation_shard.engines.torch.memory import keep_freed_memory, total_memory
from text_generation_shard.engines.torch.ops.interface import Kernels
from text_generation_shard.engines.torch.parallel.group import ParallelGroup, join_group
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.prepare import Prepared, Target, check_memory, describe
from text_generation_shard.engines.torch.trace import open_trace

STATES_FRACTION = 0.25
"""Largest share of the usable memory that the states of layers with a state take."""

log = structlog.get_logger()


def build_huggingface_engine(config: ShardConfig) -> Engine:
    """Load the model, or this rank's part of it. Raises EngineError with a one-line message if it cannot be run."""
    # torch counts the cores of its affinity only, not the quota of a container.
    torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), usable_cpus()))
    prepared = prepare_for_transformers(config, Target.of(config))
    model_config, info, grammars = prepared.model, prepared.info, prepared.grammars
    device, dtype = prepared.target.device, prepared.dtype
    if device.type == "cuda" or config.world_size > 1:
        return _build_with_runner(config, prepared)
    keep_freed_memory()
    group = ParallelGroup(TensorParallelRank())
    model = TransformersModel(load_model(config, model_config, group, device, dtype))
    info = _with_states(info, model, int(total_memory() * config.cpu_memory_fraction))

    def executor() -> Executor:
        shape = CacheShape(tuple(model.layers), device, dtype)
        return CpuExecutor(model, shape, info.max_sequence_length, info.max_slots, config.cpu_memory_fraction)

    check_model(model, model_config.vocab_size, info.max_sequence_length, executor, group)
    model.record()
    return TorchEngine(info, executor(), grammars, open_trace(config))


def prepare_for_transformers(config: ShardConfig, target: Target) -> Prepared[TransformersConfig]:
    """Check a model that transformers is to run. Raises EngineError."""
    model_config = read_config(Path(config.model_path), config.quantize)
    dtype = getattr(torch, config.dtype or model_config.dtype)
    # The weights are dequantized.
    check_memory(replace(model_config, quantization=None), dtype.itemsize, target, config.world_size)
    if config.world_size > 1:
        _check_division(model_config, config)
    prepared = describe(config, model_config, target)
    if (longest := prepared.info.max_sequence_length) < TOKENS:
        raise EngineError(
            f"{config.model_path}/config.json: a context of {longest} tokens is shorter than the {TOKENS} that the check "
            "of a model for transformers takes"
        )
    return prepared


def _check_division(model_config: TransformersConfig, config: ShardConfig) -> None:
    """Raise EngineError if the model cannot be divided over the ranks, before the checkpoint is read."""
    with torch.device("meta"):
        model = model_config.model_class(model_config.library)
    divide(model, ParallelGroup(TensorParallelRank(config.rank, config.world_size)), torch.device("meta"))


def _build_with_runner(config: ShardConfig, prepared: Prepared[TransformersConfig]) -> Engine:
    """Build the engine of a GPU, or of a rank of a group. A group on CPUs uses the reference kernels, which are slow."""
    from text_generation_shard.engines.torch.cuda.build import prepare_device
    from text_generation_shard.engines.torch.cuda.device_memory import DeviceMemory
    from text_generation_shard.engines.torch.cuda.executor import CudaExecutor
    from text_generation_shard.engines.torch.cuda.runner import Runner
    from text_generation_shard.engines.torch.cuda.worker import TPWorker
    from text_generation_shard.engines.torch.parallel.follower import FollowerEngine

    model_config, info, grammars = prepared.model, prepared.info, prepared.grammars
    device, dtype = prepared.target.device, prepared.dtype
    on_cuda = device.type == "cuda"
    prepare_device(device, dtype)
    group = join_group(config, device)
    alone = ParallelGroup(TensorParallelRank())
    model = TransformersModel(load_model(config, model_config, group, device, dtype), _head_dims(device))
    fraction = config.cuda_memory_fraction if on_cuda else config.cpu_memory_fraction
    info = _with_states(info, model, int(prepared.target.memory * fraction))
    memory = DeviceMemory(device, fraction)

    def runner(group: ParallelGroup) -> Runner:
        if on_cuda:
            torch.cuda.empty_cache()
        shape = CacheShape(tuple(model.layers), device, dtype)
        kernels = _kernels(model, shape, info)
        served = model if model.decoder is None else model.decoder.on(kernels)
        return Runner(served, kernels, group, shape, info.max_slots, info.max_sequence_length)

    def executor(group: ParallelGroup = alone) -> CudaExecutor:
        shape = CacheShape(tuple(model.layers), device, dtype)
        return CudaExecutor(runner(group), memory, group, shape, info.max_slots)

    _check_faster(model, info, executor, group)
    model.record()
    if config.rank > 0:
        return FollowerEngine(info, config.rank, group.follower, TPWorker(runner(group), memory, device))
    return TorchEngine(_bounded_by_chunk(info, model), executor(group), grammars, open_trace(config))


def _with_states(info: EngineInfo, model: TransformersModel, memory: int) -> EngineInfo:
    """Record the model and allocate the states of all slots; return the description with as many slots as have memory."""
    model.record()
    if not model.keeps_states:
        return info
    slots = int(memory * STATES_FRACTION) // model.state_bytes - 1
    if slots < 1:
        raise model.refusal(f"the states of two sequences take {2 * model.state_bytes / 2**30:.1f} GiB of memory")
    if slots < info.max_slots:
        log.info("the memory of states bounds the number of sequences", sequences=slots)
    info = replace(info, max_slots=min(slots, info.max_slots), keeps_states=True)
    model.allocate_states(info.max_slots)
    return info


def _head_dims(device: torch.device) -> tuple[int, ...]:
    """Return the head sizes to which smaller heads are widened; empty: none are."""
    if device.type == "cpu":
        return ()
    from text_generation_shard.engines.torch.attention.chunks import FLASHINFER_HEAD_DIMS

    return FLASHINFER_HEAD_DIMS


def _kernels(model: TransformersModel, shape: CacheShape, info: EngineInfo) -> Kernels:
    if shape.device.type == "cpu":
        from text_generation_shard.engines.torch.ops.reference import ReferenceKernels

        if len(set(model.rules)) > 1:
            raise model.refusal("its attention is scaled by layer, which groups on CPUs do not do")
        return ReferenceKernels(*model.rules[0])
    from text_generation_shard.engines.torch.ops.triton import TritonKernels

    hidden_size = model.library.get_input_embeddings().weight.shape[1]
    return TritonKernels(shape, model.rules, info.vocab_size, hidden_size, info.max_slots)


def _bounded_by_chunk(info: EngineInfo, model: TransformersModel) -> EngineInfo:
    """Return the description of an engine whose kernels do not divide positions into chunks."""
    chunks = [layer.chunk for layer in model.layers if layer.chunk is not None]
    if not chunks or min(chunks) >= info.max_sequence_length:
        return info
    # Within the first chunk, it makes no difference.
    log.info("sequences end with the first chunk of attention", tokens=min(chunks))
    return replace(info, max_sequence_length=min(chunks))


def _check_faster(
    model: TransformersModel, info: EngineInfo, executor: Callable[[], Executor], group: ParallelGroup
) -> None:
    """Check the model as the native decoder if it can be one, else with faster parts; without them, if it is wrong with them."""
    from text_generation_shard.engines.torch.huggingface.find_decoder import find_decoder

    def check(change: Callable[[], None] = lambda: None) -> EngineError | None:
        try:
            check_model(model, info.vocab_size, info.max_sequence_length, executor, group, (WINDOW,), change)
        except EngineError as error:
            return error
        return None

    model.decoder = find_decoder(model, info.max_sequence_length, group)
    if model.decoder is not None:
        if (error := check()) is None:
            return
        log.warning("the native decoder is not used", reason=str(error))
        model.decoder = None
    if model.library.device.type == "cuda":
        from text_generation_shard.engines.torch.huggingface.swaps import restorer, swap_parts

        restore = restorer(model.library)
        if (error := check(lambda: swap_parts(model.library))) is None:
            return
        log.warning("no parts are replaced", reason=str(error))
        restore()
    if (error := check()) is not None:
        raise error
