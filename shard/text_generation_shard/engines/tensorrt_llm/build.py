"""Build the engine: check the model folder, import TensorRT-LLM, construct its LLM, generate one token.

Everything that can be checked without TensorRT-LLM is checked before the import, which takes many seconds; building the engine
takes minutes.
"""

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from text_generation_common.log import log
from text_generation_common.progress import phase
from text_generation_shard.adapters import LoraAdapter, read_adapters
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.construct import construct, construct_compiled
from text_generation_shard.engines.tensorrt_llm.engine import TensorRTEngine
from text_generation_shard.engines.tensorrt_llm.engine_folder import CompiledEngine, check_engine
from text_generation_shard.engines.tensorrt_llm.folder import HuggingFaceModel, inspect_folder, read_hugging_face_model
from text_generation_shard.engines.tensorrt_llm.library import LLM, explain, installed_version, load_library
from text_generation_shard.engines.tensorrt_llm.lora import LoraRequests
from text_generation_shard.engines.tensorrt_llm.options import FLAG, WITHOUT_EFFECT, adapt_options, check_options
from text_generation_shard.engines.tensorrt_llm.parameters import Parameters
from text_generation_shard.yaml_options import read_options

ELSEWHERE: Mapping[str, tuple[Collection[str | None], str]] = {
    "quantize": ((None,), "serves checkpoints that are quantized already, and needs no flag for it"),
    "kv_cache_dtype": (("auto",), "has kv_cache_config: {dtype: fp8} in --trtllm-options"),
    "speculator": (("",), "has speculative_config in --trtllm-options"),
    "speculate": (("auto", "0"), "has speculative_config in --trtllm-options"),
    "mamba_ssm_cache_dtype": (("auto",), "has mamba_ssm_cache_dtype in kv_cache_config of --trtllm-options"),
}
"""Flags of the torch engine → their values that ask for nothing, and the reason why others are refused."""


def read_model(
    config: ShardConfig,
) -> tuple[HuggingFaceModel | CompiledEngine, dict[str, object], tuple[LoraAdapter, ...]]:
    """Return the model, --trtllm-options and the adapters, read without the library. Raises EngineError."""
    for name, (neutral, instead) in ELSEWHERE.items():
        if (given := getattr(config, name)) not in neutral:
            raise EngineError(f"--{name.replace('_', '-')} {given}: the tensorrt-llm engine {instead}")
    path = Path(config.model_path)
    found = inspect_folder(path)
    if isinstance(found, CompiledEngine):
        check_engine(path, found, world_size=config.tensor_parallel, installed=installed_version())
    options = read_options(config.trtllm_options, FLAG)
    for name in WITHOUT_EFFECT.keys() & options.keys():
        log.info("an option has no effect here", option=name, reason=WITHOUT_EFFECT[name])
    options = adapt_options(options)
    check_options(options, None)
    if isinstance(found, CompiledEngine):
        return found, options, ()
    return read_hugging_face_model(found, options), options, read_adapters(config)


def build(config: ShardConfig) -> TensorRTEngine:
    """Return an engine that has generated a token. Raises EngineError with a message of one line."""
    model, options, adapters = read_model(config)
    if "telemetry_config" not in options:
        os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")  # ≥ 1.3 reports usage to NVIDIA otherwise
    library = load_library()
    if isinstance(model, CompiledEngine):
        check_options(options, library.engine_options)
        construction, kind = construct_compiled(config, model, options), library.engine_llm
    else:
        check_options(options, library.options)
        construction, kind = construct(config, library, model, options, adapters), library.llm
    requests = LoraRequests(library.lora_request, construction.keywords.get("lora_config", {}))
    for adapter in adapters:
        requests.add(adapter)
    parameters = Parameters(library, construction.capabilities, model.vocab_size, model.eos_token_ids, requests)
    llm = _build_llm(library.version, kind, construction.keywords)
    return TensorRTEngine(llm, library, parameters, construction, config.hang_timeout)


def _build_llm(version: str, kind: type[Any] | None, keywords: Mapping[str, Any]) -> LLM:
    if kind is None:
        raise EngineError(
            f"TensorRT-LLM {version} cannot load compiled engines: serve the Hugging Face checkpoint itself, "
            "or install TensorRT-LLM 1.2"
        )
    log.info("building the engine", version=version, **{k: v for k, v in keywords.items() if k != "model"})
    # The constructor spawns the worker processes with the environment of this moment.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    started = time.monotonic()
    try:
        with phase("TensorRT-LLM builds the engine"):
            llm = kind(**keywords)
    except Exception as error:
        cause = error.__cause__
        detail = f" ({type(cause).__name__}: {explain(cause)})" if cause is not None else ""
        log.error("TensorRT-LLM could not build the engine", exc_info=error)
        if "guided_decoding_backend" in keywords:
            detail += "; without grammars: --trtllm-options 'guided_decoding_backend: null'"
        raise EngineError(f"TensorRT-LLM could not build the engine: {explain(error)}{detail}") from error
    log.info("engine built", seconds=round(time.monotonic() - started, 1))
    return llm
