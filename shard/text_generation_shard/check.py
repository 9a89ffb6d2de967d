"""Say how a shard would serve a model, without loading it: the program behind `text-generation-launcher check`.

The functions are those of a start: settings, config, headers and tokenizer are checked as there, and no weight is read.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from text_generation_common.command_line import parse_config, print_to_end
from text_generation_common.exit_codes import ExitCode
from text_generation_common.lifeline import follow_parent
from text_generation_common.logs import configure_logging
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardCheckConfig, choose_engine
from text_generation_shard.convert import info_to_pb
from text_generation_shard.engine import EngineError, EngineInfo
from text_generation_shard.engines import both_errors, build_engine, check_transformers, choose_code, has_gpu


def check(config: ShardCheckConfig) -> dict[str, Any]:
    """Return the facts of the model as JSON values. Raises EngineError with the reason why it would be refused."""
    name = choose_engine(config.engine, has_gpu=has_gpu(config) or (config.memory > 0 and config.device != "cpu"))
    if name == "echo":
        groups = (CacheGroup(config.echo_blocks),)
        return _described(build_engine(config).info, code="echo", reason="--engine echo", groups=groups)
    if name == "tensorrt-llm":
        return _check_tensorrt_llm(config)
    return _check_torch(config)


def _check_torch(config: ShardCheckConfig) -> dict[str, Any]:
    choice = choose_code(config)
    if choice.model is None:
        check_transformers(config)
    import torch

    from text_generation_shard.engines.torch.build.footprint import native_footprint, transformers_footprint
    from text_generation_shard.engines.torch.build.prepare import Target, prepare

    if config.memory:
        target = Target(torch.device("cpu" if config.device == "cpu" else "cuda"), config.memory)
    else:
        target = Target.of(config)
    limits = WarmUpLimits.of(config)
    if choice.model is not None:
        native = prepare(config, choice.model, target)
        footprint = native_footprint(config, native, limits)
        quantization = choice.model.quantization
    else:
        from text_generation_shard.engines.torch.build.transformers import prepare_for_transformers

        try:
            foreign = prepare_for_transformers(config, target)
            footprint = transformers_footprint(config, foreign, limits)
        except EngineError as error:
            raise both_errors(choice, error) from None
        quantization = foreign.model.quantization
    groups, shape = footprint.groups(limits), footprint.cache_shape
    token = None if shape is None else sum(shape.block_bytes[: len(shape.windows)]) // footprint.info.block_size
    return _described(
        footprint.info,
        code="transformers" if choice.model is None else "native",
        reason=choice.reason,
        groups=groups,
        quantization=None if quantization is None else quantization.label,
        memory={
            "device": target.memory,
            "usable": footprint.memory,
            "weights": footprint.weights,
            "copies": footprint.copies,
            "images": footprint.images,
            "largest_step": footprint.largest_step,
            "kv_cache_left": footprint.cache,
            "kv_cache_token": token,
            "state": 0 if shape is None else shape.state_bytes,
        },
    )


def _check_tensorrt_llm(config: ShardCheckConfig) -> dict[str, Any]:
    from text_generation_shard.engines.tensorrt_llm.build import read_model
    from text_generation_shard.engines.tensorrt_llm.engine_folder import CompiledEngine

    model, _, _ = read_model(config)
    weights = sum(path.stat().st_size for path in Path(config.model_path).glob("*.safetensors"))
    return {
        "engine": "tensorrt-llm",
        "code": "compiled engines" if isinstance(model, CompiledEngine) else "Hugging Face checkpoint",
        "code_reason": "the kind of the folder",
        "model_type": model.model_type,
        "dtype": config.dtype or model.dtype,
        "max_sequence_length": model.max_sequence_length,
        "memory": {"weights": weights // config.tensor_parallel} if weights else None,
    }


def _described(
    info: EngineInfo,
    *,
    code: str,
    reason: str,
    groups: tuple[CacheGroup, ...] | None,
    quantization: str | None = None,
    memory: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    return {
        "engine": info.engine,
        "code": code,
        "code_reason": reason,
        **{name: getattr(info, name) for name in ("model_type", "dtype", "device")},
        "quantization": quantization,
        **{name: getattr(info, name) for name in ("max_sequence_length", "max_slots", "block_size")},
        "blocks": None if groups is None else groups[0].num_blocks,
        "cache_groups": [
            {"window": each.window, "state": each.is_state, "blocks": each.num_blocks, "host_blocks": each.host_blocks}
            for each in groups or ()
        ],
        "memory": memory,
        "description": info_to_pb(info, 0, 1).SerializeToString().hex(),
    }


def main() -> None:
    """Check the model of the command line; print facts, or the reason of a refusal, as one line of JSON."""
    config = parse_config(ShardCheckConfig)
    follow_parent(config.lifeline_fd)
    configure_logging(config, "check")
    try:
        found = check(config)
    except EngineError as error:
        found = {"refused": str(error)}
    print_to_end(f"{json.dumps(found)}\n")
    sys.exit(ExitCode.FAILED if "refused" in found else ExitCode.STOPPED)


if __name__ == "__main__":
    main()
