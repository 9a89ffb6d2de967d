"""Builds the engine of a model that the native decoder computes."""

from functools import partial

import torch

from text_generation_shard.adapters import LoraRoom, read_adapter, read_adapters
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.engines.torch.build.builder import EngineBuilder
from text_generation_shard.engines.torch.build.compile_ahead import CompileAhead
from text_generation_shard.engines.torch.build.fp8_cache import fp8_cache
from text_generation_shard.engines.torch.build.prepare import Prepared, Target, prepare
from text_generation_shard.engines.torch.engine.runner import Runner
from text_generation_shard.engines.torch.layers.quantized.humming import copies_may_lack_room
from text_generation_shard.engines.torch.models.native.decoder import Decoder
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig
from text_generation_shard.engines.torch.models.native.parameters import ModelWeights, empty_weights
from text_generation_shard.engines.torch.weights.load import load


@torch.inference_mode()
def build_native_engine(config: ShardConfig, model_config: ModelConfig) -> Engine:
    """Load the model, or this rank's part of it. Raises EngineError with a one-line message if it cannot be run."""
    prepared = prepare(config, model_config, Target.of(config))
    ahead = CompileAhead(config, prepared)
    builder, runner = build_model(config, prepared, ahead)
    ahead.wait()
    return builder.engine(runner)


def load_model(config: ShardConfig, model_config: ModelConfig, weights: ModelWeights) -> None:
    """Load the weights of a model and of its predicting layer. Raises EngineError."""
    load(config, weights.named_parameters(), model_config.quantization)
    if (own := model_config.prediction) is not None and weights.prediction is not None:
        load(config, weights.prediction.named_parameters(), own.model.quantization, own.folder)


def build_model(
    config: ShardConfig, prepared: Prepared[ModelConfig], ahead: CompileAhead | None
) -> tuple[EngineBuilder, Runner]:
    """Load a model and return its runner, and the builder of its engine. Raises EngineError.

    `ahead`: the processes that compile its kernels; None in one of them.
    """
    model_config = prepared.model
    builder = EngineBuilder(config, prepared)
    on_cpu, group = builder.device.type == "cpu", builder.group
    adapters = read_adapters(config)
    room = LoraRoom.of(config, adapters)
    weights = empty_weights(model_config, group.tp, builder.device, builder.dtype, adapters, room, on_cpu=on_cpu)
    if weights.adapters is not None:
        weights.adapters.read = partial(read_adapter, config=config)
        builder.adapters = weights.adapters
    kv_heads = {
        index: group.tp.kv_heads(model_config.layers[index].num_kv_heads)
        for index, layer in enumerate(weights.layers)
        if layer.attention is not None
    }
    fp8 = fp8_cache(config, kv_heads, builder.device, model_config.family.names.attention)
    load_model(config, model_config, weights)
    if ahead is not None and copies_may_lack_room(builder.device):
        ahead.wait()  # the memory of its processes would count
    weights.process_weights_after_loading()
    if on_cpu:
        weights.pack()
    scales = [(model_config.attention_scale, model_config.attention_softcap)] * len(weights.layer_shapes)
    if weights.prediction is not None:
        scales[-1] = weights.prediction.score_rules
    runner = builder.runner(
        lambda ops: Decoder(model_config, weights, ops, group),
        weights.layer_shapes,
        scales,
        model_config.hidden_size,
        fp8=fp8,
        state_bytes=weights.state_bytes,
        has_axes=any(rope.axes for rope in model_config.ropes),
        image_levels=model_config.image_levels,
        compiles=ahead is not None,
    )
    return builder, runner
