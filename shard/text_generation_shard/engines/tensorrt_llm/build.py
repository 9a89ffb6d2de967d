"""From settings to an engine: look at the folder, import the library, construct, prove.

Everything that can be found wrong without TensorRT-LLM is found before it is imported: the import takes many seconds, and building
the engine minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import structlog

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, EngineInfo, Scheduling
from text_generation_shard.engines.tensorrt_llm.api import LLM
from text_generation_shard.engines.tensorrt_llm.construct import Construction, construct, construct_compiled
from text_generation_shard.engines.tensorrt_llm.driver import first_line
from text_generation_shard.engines.tensorrt_llm.engine import Running, TensorRTEngine
from text_generation_shard.engines.tensorrt_llm.facts import ModelFacts, read_facts
from text_generation_shard.engines.tensorrt_llm.folder import FolderKind, ModelFolder, check_folder, inspect_folder
from text_generation_shard.engines.tensorrt_llm.library import Library, installed_version, load_library
from text_generation_shard.engines.tensorrt_llm.options import check_options, read_options
from text_generation_shard.engines.tensorrt_llm.parameters import MAX_LOGPROBS, Parameters

TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's own default."""
FIRST_TOKEN_TIMEOUT_S = 600.0
"""The first token after a build: kernels may be tuned for it."""

log = structlog.get_logger()


def build(config: ShardConfig) -> TensorRTEngine:
    """An engine that has produced a token. Raises EngineError, in one line."""
    folder = inspect_folder(Path(config.model_path))
    check_folder(folder, world_size=config.tensor_parallel, installed=installed_version(), gpus=None)
    options = read_options(config.trtllm_options) if config.trtllm_options else {}
    check_options(options, None)
    facts = None if folder.kind is FolderKind.ENGINE else read_facts(Path(config.model_path))
    library = load_library()
    check_options(options, library.options if facts is not None else library.engine_options)
    how = construct_compiled(config, folder, options) if facts is None else construct(config, library, facts, options)
    info = _info(config, how, options, folder, facts)
    parameters = Parameters(library, how.abilities, info.vocab_size, info.eos_token_ids)
    running = Running(_construct(library, how), library, parameters, info)
    return TensorRTEngine(running, config.hang_timeout, FIRST_TOKEN_TIMEOUT_S)


def _construct(library: Library, how: Construction) -> LLM:
    kind = library.engine_llm if how.compiled else library.llm
    if kind is None:
        raise EngineError(
            f"TensorRT-LLM {library.version} cannot load compiled engines: serve the Hugging Face checkpoint itself, "
            "or install TensorRT-LLM 1.2"
        )
    log.info("building the engine", version=library.version, **{k: v for k, v in how.keywords.items() if k != "model"})
    # Workers are spawned from here, and the environment they get is the one of now.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    started = time.monotonic()
    try:
        llm = kind(**how.keywords)
    except Exception as error:
        cause = error.__cause__
        because = f" ({type(cause).__name__}: {first_line(cause)})" if cause is not None else ""
        log.error("TensorRT-LLM could not build the engine", exc_info=error)
        raise EngineError(f"TensorRT-LLM could not build the engine: {first_line(error)}{because}") from error
    log.info("engine built", seconds=round(time.monotonic() - started, 1))
    return cast("LLM", llm)


def _info(
    config: ShardConfig,
    how: Construction,
    options: Mapping[str, object],
    folder: ModelFolder,
    facts: ModelFacts | None,
) -> EngineInfo:
    cache = how.keywords["kv_cache_config"]
    info = EngineInfo(
        engine="tensorrt-llm",
        model_id=config.model_id or config.model_path,
        model_type="",
        dtype=config.dtype or "",
        device="cuda",
        scheduling=Scheduling.SELF,
        vocab_size=0,
        max_sequence_length=how.max_sequence_length,
        max_slots=how.max_slots,
        block_size=int(cache.get("tokens_per_block", TOKENS_PER_BLOCK)),
        eos_token_ids=(),
        suggested_prefill_tokens=how.max_num_tokens,
        max_top_n_tokens=MAX_LOGPROBS if how.abilities.scores_tokens else 0,
        grammar_kinds=how.abilities.grammar_kinds,
        unsupported=how.abilities.unsupported,
        reserves_longest=how.reserves_longest,
    )
    if facts is not None:
        return replace(
            info,
            model_type=facts.model_type,
            dtype=info.dtype or facts.dtype,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
        )
    built = folder.engine
    assert built is not None
    return replace(
        info,
        dtype=built.dtype,
        vocab_size=built.vocab_size,
        eos_token_ids=built.eos_token_ids,
        block_size=built.tokens_per_block,
    )
