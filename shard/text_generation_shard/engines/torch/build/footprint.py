"""The memory that a model takes in the torch engine, from its config and the headers of its files: no weight is read."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.adapters import LoraRoom, read_adapters
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, EngineInfo
from text_generation_shard.engines.torch.batch.kv_cache import FP8_DTYPES, CacheShape, Fp8Cache, LayerShape
from text_generation_shard.engines.torch.build.prepare import META, Description, Prepared
from text_generation_shard.engines.torch.device.memory import margin_of
from text_generation_shard.engines.torch.engine.warm_up import cache_groups, with_host_blocks
from text_generation_shard.engines.torch.engine.worker import GRAPH_BYTES
from text_generation_shard.engines.torch.layers.quantized.humming import left_by_copies
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig
from text_generation_shard.engines.torch.models.native.parameters import empty_weights
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.runner.decode_graphs import capture_sizes
from text_generation_shard.engines.torch.runner.piecewise_graphs import CAPTURE_SIZES, PIECES_PER_GRAPH
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint
from text_generation_shard.engines.torch.weights.load import part_of, plan_loading

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.models.huggingface.config import TransformersConfig

CPU_PROCESS = 350 << 20
"""Bytes of Python, PyTorch and the tokenizer of grammars."""
CUDA_LIBRARIES = 1 << 30
"""Bytes of the CUDA context, cuBLAS and FlashInfer's workspace."""
SORTED_BYTES = 40
"""Bytes of a logit in the hardest sampling on a CPU, and in the order by which a GPU finds thresholds."""
LOGIT_BYTES = 12


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a model on one device, in bytes, as far as it is known before it is loaded."""

    info: EngineInfo
    memory: int
    """The memory of the device that may be used."""
    weights: int
    cache_shape: CacheShape | None
    """The shape of the KV cache; None: found once the model is loaded."""
    largest_step: int
    """Estimate of the largest step, graphs and libraries; the start measures it."""
    images: int = 0
    """The encoder of images, and the images that it keeps."""
    host_cache: int = 0
    """The part of the host cache of one device."""
    copies: int = 0
    """Packed weights once more, for steps of a few rows."""

    @property
    def cache(self) -> int:
        """The memory that is left for the KV cache."""
        return self.memory - self.weights - self.copies - self.largest_step - self.images

    def groups(self, limits: WarmUpLimits) -> tuple[CacheGroup, ...] | None:
        """Return the groups of the KV cache that fit; None if its shape is not known. Raises EngineError."""
        if (shape := self.cache_shape) is None:
            return None
        groups = cache_groups(self.info, limits, shape.kinds, shape.block_bytes, self.cache)
        if not self.host_cache:
            return groups
        return with_host_blocks(groups, self.info, limits, shape.block_bytes, self.host_cache)


def native_footprint(config: ShardConfig, prepared: Prepared[ModelConfig], limits: WarmUpLimits) -> Footprint:
    """Return the memory of a model in the native decoder. Raises EngineError for tensors that do not fit its config."""
    model, dtype = prepared.model, prepared.dtype
    tp = TensorParallelRank(config.rank, config.world_size)
    with torch.inference_mode():
        on_cpu = prepared.target.device.type == "cpu"
        adapters = read_adapters(config)
        weights = empty_weights(model, tp, META, dtype, adapters, LoraRoom.of(config, adapters), on_cpu=on_cpu)
    parameters, predicting = weights.named_parameters(), weights.prediction
    if config.load_format != "dummy":
        plan_loading(Path(config.model_path), parameters, model.quantization)
    # A draft model has names of the model.
    both = [*parameters.values(), *(() if predicting is None else predicting.named_parameters().values())]
    tensors = [part_of(parameter).tensor for parameter in both]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    nbytes += 0 if weights.adapters is None else weights.adapters.nbytes
    sizes = model.num_layers, model.hidden_size
    found = _footprint(config, prepared, limits, nbytes, weights.layer_shapes, *sizes, state_bytes=weights.state_bytes)
    if config.world_size > 1:
        return found
    packed = sum(tensor.nbytes for tensor in tensors if tensor.dtype == torch.int32)
    kept = None if model.experts is None else model.kept_bytes(dtype.itemsize)
    room = prepared.target.memory - nbytes - left_by_copies(prepared.target.memory, kept)
    return replace(found, copies=max(0, min(packed, int(room))))


def transformers_footprint(
    config: ShardConfig, prepared: "Prepared[TransformersConfig]", limits: WarmUpLimits
) -> Footprint:
    """Return the memory of a model that transformers runs. The tensors of its checkpoint are compared when it is loaded."""
    from text_generation_shard.engines.torch.build.transformers import bounded_by_chunk
    from text_generation_shard.engines.torch.models.huggingface.load import load_model
    from text_generation_shard.engines.torch.models.huggingface.model import TransformersModel

    if config.load_format != "dummy":
        Checkpoint(Path(config.model_path))
    group = ParallelGroup(TensorParallelRank(config.rank, config.world_size))
    dummy = config.model_copy(update={"load_format": "dummy"})
    model = TransformersModel(load_model(dummy, prepared.model, group, META, prepared.dtype))
    nbytes = sum({id(each): each.nbytes for each in model.library.parameters()}.values())
    hidden_size = model.library.get_input_embeddings().weight.shape[1]
    # The library's grouped product of experts takes no other dtype than bfloat16 without a device.
    model.library.set_experts_implementation("batched_mm")
    try:
        model.record()
    except EngineError:  # the values of tensors decide on its path: it cannot be followed without them
        return _footprint(config, prepared, limits, nbytes, (), 0, hidden_size, state_bytes=0)
    if prepared.target.device.type != "cpu":
        prepared = replace(prepared, info=bounded_by_chunk(prepared.info, model))
    sizes, states = (len(model.layers), hidden_size), model.states.block_bytes
    return _footprint(config, prepared, limits, nbytes, model.layers, *sizes, state_bytes=states)


def _footprint(  # noqa: PLR0913 – the sizes of a model
    config: ShardConfig,
    prepared: Prepared[Description],
    limits: WarmUpLimits,
    weights: int,
    layers: Iterable[LayerShape],
    num_layers: int,
    hidden_size: int,
    *,
    state_bytes: int,
) -> Footprint:
    layers, target, info = tuple(layers), prepared.target, prepared.info
    fraction = config.cpu_memory_fraction if target.device.type == "cpu" else config.cuda_memory_fraction
    fp8 = None if config.kv_cache_dtype == "auto" else Fp8Cache(FP8_DTYPES[config.kv_cache_dtype])
    shape = CacheShape(layers, META, prepared.dtype, info.max_sequence_length, fp8, state_bytes)
    tokens = limits.max_batch_prefill_tokens or info.suggested_prefill_tokens
    slots = min(limits.max_batch_size or info.max_slots, info.max_slots)
    # The outputs of all projections of a layer, and the residual stream around them.
    width = prepared.model.active_weights // (max(num_layers, 1) * hidden_size) // config.world_size
    step = tokens * (width + 4 * hidden_size) * prepared.dtype.itemsize
    memory = int(target.memory * fraction)
    if target.device.type == "cpu":
        step += slots * info.vocab_size * SORTED_BYTES + CPU_PROCESS
    else:
        memory -= margin_of(target.memory)
        decoding = len(capture_sizes(slots))
        graphs = decoding + len(CAPTURE_SIZES) * -(-(num_layers + 1) // PIECES_PER_GRAPH)
        graphs *= 2 if info.max_loras else 1
        graphs += decoding if isinstance(prepared.model, ModelConfig) and prepared.model.prediction else 0
        step += slots * info.vocab_size * LOGIT_BYTES + graphs * GRAPH_BYTES + CUDA_LIBRARIES
    images = 0
    if info.max_images:
        from text_generation_shard.engines.torch.models.huggingface.images import image_bytes

        images = image_bytes(Path(config.model_path), prepared.dtype, target.device)
    return Footprint(info, memory, weights, shape if layers else None, step, images, config.host_cache_bytes)
