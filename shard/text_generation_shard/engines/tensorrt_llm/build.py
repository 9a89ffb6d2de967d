"""Build the engine: check the model folder, import TensorRT-LLM, construct its LLM, generate one token.

Everything that can be checked without TensorRT-LLM is checked before the import, which takes many seconds; building the engine
takes minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from text_generation_common.progress import phase
from text_generation_shard.adapters import LoraAdapter, read_adapters
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, EngineInfo, Scheduling
from text_generation_shard.engines.tensorrt_llm.construct import Construction, construct, construct_compiled
from text_generation_shard.engines.tensorrt_llm.engine import TensorRTEngine
from text_generation_shard.engines.tensorrt_llm.engine_folder import CompiledEngine, check_engine
from text_generation_shard.engines.tensorrt_llm.folder import (
    HuggingFaceModel,
    ModelFolder,
    inspect_folder,
    read_hugging_face_model,
)
from text_generation_shard.engines.tensorrt_llm.library import LLM, Library, explain, installed_version, load_library
from text_generation_shard.engines.tensorrt_llm.lora import lora_requests
from text_generation_shard.engines.tensorrt_llm.options import (
    WITHOUT_EFFECT,
    adapt_options,
    check_options,
    read_options,
)
from text_generation_shard.engines.tensorrt_llm.parameters import MAX_LOGPROBS, Parameters

FIRST_TOKEN_TIMEOUT_S = 600.0
"""Time for the first token after a build: it may include the tuning of kernels."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model, as far as it is read without the library."""

    folder: ModelFolder
    options: Mapping[str, object]
    """--trtllm-options."""
    model: HuggingFaceModel | CompiledEngine
    adapters: tuple[LoraAdapter, ...]


def read_model(config: ShardConfig) -> ReadModel:
    """Read the folder of the model and the options. Raises EngineError if they cannot be served."""
    if config.quantize is not None:
        raise EngineError(
            f"--quantize {config.quantize}: the tensorrt-llm engine serves checkpoints that are quantized already, "
            "and needs no flag for it"
        )
    folder = inspect_folder(Path(config.model_path))
    if folder.engine is not None:
        check_engine(folder.path, folder.engine, world_size=config.tensor_parallel, installed=installed_version())
    given = read_options(config.trtllm_options)
    for name in WITHOUT_EFFECT.keys() & given.keys():
        log.info("an option has no effect here", option=name, reason=WITHOUT_EFFECT[name])
    options = adapt_options(given)
    check_options(options, None)
    model = folder.engine or read_hugging_face_model(folder, options)
    return ReadModel(folder, options, model, read_adapters(config) if folder.engine is None else ())


def build(config: ShardConfig) -> TensorRTEngine:
    """Return an engine that has generated a token. Raises EngineError with a message of one line."""
    read = read_model(config)
    folder, options, model, adapters = read.folder, read.options, read.model, read.adapters
    if "telemetry_config" not in options:
        os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")  # ≥ 1.3 reports usage to NVIDIA otherwise
    library = load_library()
    check_options(options, library.options if folder.engine is None else library.engine_options)
    if isinstance(model, CompiledEngine):
        construction = construct_compiled(config, model, options)
    else:
        construction = construct(config, library, model, options, adapters)
    info = _info(config, library, construction, model, adapters)
    requests = lora_requests(adapters, library.lora_request)
    parameters = Parameters(library, construction.capabilities, info.vocab_size, info.eos_token_ids, requests)
    llm = _build_llm(library, construction)
    return TensorRTEngine(llm, library, parameters, construction, info, config.hang_timeout, FIRST_TOKEN_TIMEOUT_S)


def _build_llm(library: Library, construction: Construction) -> LLM:
    kind = library.engine_llm if construction.compiled else library.llm
    if kind is None:
        raise EngineError(
            f"TensorRT-LLM {library.version} cannot load compiled engines: serve the Hugging Face checkpoint itself, "
            "or install TensorRT-LLM 1.2"
        )
    keywords = construction.keywords
    log.info("building the engine", version=library.version, **{k: v for k, v in keywords.items() if k != "model"})
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


def _info(
    config: ShardConfig,
    library: Library,
    construction: Construction,
    model: HuggingFaceModel | CompiledEngine,
    adapters: Sequence[LoraAdapter],
) -> EngineInfo:
    capabilities = construction.capabilities
    return EngineInfo(
        engine="tensorrt-llm",
        model_id=config.model_id or config.model_path,
        model_type="" if isinstance(model, CompiledEngine) else model.model_type,
        dtype=config.dtype or model.dtype,
        device="cuda",
        scheduling=Scheduling.SELF,
        vocab_size=model.vocab_size,
        max_sequence_length=construction.max_sequence_length,
        max_slots=construction.max_slots,
        block_size=construction.block_size,
        eos_token_ids=model.eos_token_ids,
        suggested_prefill_tokens=construction.max_num_tokens,
        max_top_n_tokens=MAX_LOGPROBS if capabilities.logprobs else 0,
        grammar_kinds=capabilities.grammar_kinds,
        unsupported=capabilities.unsupported,
        reserves_max_length=construction.reserves_max_length,
        adapters=tuple(adapter.name for adapter in adapters),
    )
