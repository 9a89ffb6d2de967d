"""The keywords of `LLM`: ours, the operator's options over our defaults, and what was settled with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text_generation_proto.values import GrammarKind
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.facts import ModelFacts
from text_generation_shard.engines.tensorrt_llm.folder import ModelFolder
from text_generation_shard.engines.tensorrt_llm.library import Library
from text_generation_shard.engines.tensorrt_llm.parameters import CXX_SAMPLER, Abilities

MAX_BATCH_SIZE = 256
"""Sequences at once, unless something else is asked for. TensorRT-LLM's own default, 2048, sizes buffers and CUDA graphs
that most machines never fill."""
MAX_NUM_TOKENS = 8192
"""Tokens of one iteration: TensorRT-LLM's own default."""
FREE_MEMORY_FRACTION = 0.9
"""Share of the memory left after the weights that the KV cache takes: TensorRT-LLM's own default."""

SETTLED = frozenset({"max_seq_len", "max_input_len"})
"""Options that cannot be set for compiled engines: 1.2 would use the built values in their place, in silence."""


@dataclass(frozen=True, slots=True)
class Construction:
    """How an engine is built, and what it can then do."""

    keywords: dict[str, Any]
    compiled: bool
    """Whether it is built by the backend for compiled engines."""
    abilities: Abilities
    max_slots: int
    max_num_tokens: int
    max_sequence_length: int
    reserves_longest: bool
    """GUARANTEED_NO_EVICT, its default: a sequence begins once there is room for all it may become (issue #9412)."""


def construct(config: ShardConfig, library: Library, facts: ModelFacts, options: Mapping[str, object]) -> Construction:
    """How to build the engine for a Hugging Face folder. `options` are the operator's. Raises EngineError."""
    folder = Path(config.model_path)
    has_tokenizer = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    keywords: dict[str, Any] = {
        "max_batch_size": config.max_batch_size or MAX_BATCH_SIZE,
        "max_num_tokens": MAX_NUM_TOKENS,
        "max_seq_len": facts.max_sequence_length,
        # Else a prompt longer than max_num_tokens is refused.
        "enable_chunked_prefill": True,
        # Where the KV cache and the queue stand is told in the statistics of the iterations alone.
        "enable_iter_perf_stats": True,
        **({"guided_decoding_backend": "llguidance"} if has_tokenizer else {}),
        **({"load_format": "DUMMY"} if config.load_format == "dummy" else {}),
    }
    keywords = {name: value for name, value in keywords.items() if name in library.options} | dict(options)
    keywords["kv_cache_config"] = _kv_cache(config, options)
    guided = keywords.get("guided_decoding_backend")
    keywords |= {
        "model": str(folder),
        "tensor_parallel_size": config.tensor_parallel,
        # Guided decoding needs to know the tokens' texts; nothing else does.
        "skip_tokenizer_init": guided is None,
        "dtype": config.dtype or "auto",
    }
    kinds: tuple[GrammarKind, ...] = (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX)
    if guided == "llguidance":
        kinds += (GrammarKind.LARK,)
    abilities = Abilities(
        honours_sampling=not library.has_sampler_choice or _sampler(options) == CXX_SAMPLER,
        scores_prompts=library.scores_prompts,
        grammar_kinds=() if guided is None else kinds,
        reads_guidance=guided == "llguidance",
    )
    return Construction(
        keywords=keywords,
        compiled=False,
        abilities=abilities,
        max_slots=_count(keywords, "max_batch_size", MAX_BATCH_SIZE),
        max_num_tokens=_count(keywords, "max_num_tokens", MAX_NUM_TOKENS),
        max_sequence_length=_count(keywords, "max_seq_len", facts.max_sequence_length),
        reserves_longest=_reserves_longest(options),
    )


def construct_compiled(config: ShardConfig, folder: ModelFolder, options: Mapping[str, object]) -> Construction:
    """How to serve a folder of compiled engines: its limits were settled when it was built. Raises EngineError."""
    built = folder.engine
    assert built is not None
    if config.dtype not in (None, built.dtype):
        raise EngineError(f"--dtype {config.dtype}: the engines in {config.model_path} were built for {built.dtype}")
    if settled := sorted(options.keys() & SETTLED):
        raise EngineError(
            f"--trtllm-options: {settled[0]} was settled when the engines in {config.model_path} were built"
        )
    keywords: dict[str, Any] = {
        "enable_chunked_prefill": built.paged_context_fmha,
        **({"max_batch_size": config.max_batch_size} if config.max_batch_size else {}),
        **options,
    }
    keywords["kv_cache_config"] = _kv_cache(config, options)
    keywords |= {
        "model": config.model_path,
        "tensor_parallel_size": built.tp_size,
        "pipeline_parallel_size": built.pp_size,
        "context_parallel_size": built.cp_size,
        "skip_tokenizer_init": True,
        "gather_generation_logits": built.gather_generation_logits,
    }
    return Construction(
        keywords=keywords,
        compiled=True,
        abilities=Abilities(
            honours_sampling=True,  # its sampler is the C++ one
            scores_prompts=False,
            scores_tokens=built.gather_generation_logits,
        ),
        max_slots=min(_count(keywords, "max_batch_size", built.max_batch_size), built.max_batch_size),
        max_num_tokens=min(_count(keywords, "max_num_tokens", built.max_num_tokens), built.max_num_tokens),
        max_sequence_length=built.max_seq_len,
        reserves_longest=_reserves_longest(options),
    )


def _kv_cache(config: ShardConfig, options: Mapping[str, object]) -> dict[str, object]:
    asked = options.get("kv_cache_config", {})
    if not isinstance(asked, Mapping):
        raise EngineError("--trtllm-options: kv_cache_config must be a mapping")
    if "tokens_per_block" in asked:
        _count(asked, "tokens_per_block", 1)
    fraction = FREE_MEMORY_FRACTION if config.cuda_memory_fraction == 1 else config.cuda_memory_fraction
    return {"free_gpu_memory_fraction": fraction, **asked}


def _reserves_longest(options: Mapping[str, object]) -> bool:
    scheduler = options.get("scheduler_config")
    policy = scheduler.get("capacity_scheduler_policy") if isinstance(scheduler, Mapping) else None
    return policy in (None, "GUARANTEED_NO_EVICT")


def _sampler(options: Mapping[str, object]) -> str:
    return str(options.get("sampler_type", ""))


def _count(keywords: Mapping[str, Any], name: str, default: int) -> int:
    value = keywords.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EngineError(f"--trtllm-options: {name} must be a whole number above 0, not {value!r}")
    return value
