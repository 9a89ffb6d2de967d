"""Builds the engine of a model that transformers runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from text_generation_common.log import log
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError, EngineInfo
from text_generation_shard.engines.torch.batch.kv_cache import Fp8Cache
from text_generation_shard.engines.torch.build.builder import EngineBuilder
from text_generation_shard.engines.torch.build.fp8_cache import fp8_cache
from text_generation_shard.engines.torch.build.prepare import Prepared, Target, check_memory, describe, dtype_name
from text_generation_shard.engines.torch.engine.executor import Executor
from text_generation_shard.engines.torch.engine.runner import Runner
from text_generation_shard.engines.torch.kernels.flashinfer_chunks import FLASHINFER_HEAD_DIMS
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.models.huggingface.check import CHUNK, TOKENS, WINDOW, check_model
from text_generation_shard.engines.torch.models.huggingface.config import TransformersConfig, read_config
from text_generation_shard.engines.torch.models.huggingface.find_decoder import find_decoder
from text_generation_shard.engines.torch.models.huggingface.load import load_model
from text_generation_shard.engines.torch.models.huggingface.model import TransformersModel
from text_generation_shard.engines.torch.models.huggingface.sharding import Division
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank


def build_transformers_engine(config: ShardConfig) -> Engine:
    """Load the model, or this rank's part of it. Raises EngineError with a one-line message if it cannot be run."""
    prepared = prepare_for_transformers(config, Target.of(config))
    builder = EngineBuilder(config, prepared)
    on_cpu, group, device = builder.device.type == "cpu", builder.group, builder.device
    fp8 = fp8_cache(config, {}, device)
    library = load_model(config, prepared.model, group, device, builder.dtype)
    model = TransformersModel(library, () if on_cpu else FLASHINFER_HEAD_DIMS)
    hidden_size = library.get_input_embeddings().weight.shape[1]
    model.record()
    info = builder.info

    def runner(steps_of: ParallelGroup | None = None, fp8: Fp8Cache | None = None) -> Runner:
        if not on_cpu:
            torch.cuda.empty_cache()
        states = model.states.block_bytes
        return builder.runner(model.with_ops, model.layers, model.rules, hidden_size, steps_of, fp8, states)

    def executor() -> Executor:
        # The check compares with the library, which has no FP8 cache.
        alone = ParallelGroup(TensorParallelRank())
        return builder.executor(runner(alone), alone)

    def check() -> None:
        limits = (WINDOW, CHUNK) if on_cpu else (WINDOW,)
        check_model(model, info.vocab_size, info.max_sequence_length, executor, group, limits)

    if not on_cpu or config.world_size > 1:
        precision = Precision.uniform(builder.dtype) if on_cpu else Precision.of(hidden_size, builder.dtype)
        model.decoder = find_decoder(model, info.max_sequence_length, group, precision)
    _check_with_and_without_decoder(model, check)
    model.record()
    if not on_cpu:
        builder.info = bounded_by_chunk(info, model)
    return builder.engine(runner(fp8=fp8))


def prepare_for_transformers(config: ShardConfig, target: Target) -> Prepared[TransformersConfig]:
    """Check a model that transformers is to run. Raises EngineError."""
    model_config = read_config(Path(config.model_path), config.quantize)
    dtype = getattr(torch, dtype_name(config, model_config, target.device))
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
    Division(model, ParallelGroup(TensorParallelRank(config.rank, config.world_size)), torch.device("meta")).divide()


def _check_with_and_without_decoder(model: TransformersModel, check: Callable[[], None]) -> None:
    """Check the model in the native decoder if one was found, else in the library's layers. Raises EngineError."""
    if model.decoder is not None:
        try:
            return check()
        except EngineError as error:
            log.warning("the native decoder is not used", reason=str(error))
            model.decoder = None
    check()


def bounded_by_chunk(info: EngineInfo, model: TransformersModel) -> EngineInfo:
    """Return the description of an engine whose kernels do not divide positions into chunks."""
    chunks = [layer.chunk for layer in model.layers if layer.chunk is not None]
    if not chunks or min(chunks) >= info.max_sequence_length:
        return info
    # Within the first chunk, it makes no difference.
    log.info("sequences end with the first chunk of attention", tokens=min(chunks))
    return replace(info, max_sequence_length=min(chunks))
