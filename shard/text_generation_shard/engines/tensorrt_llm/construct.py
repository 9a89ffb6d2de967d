"""The keyword arguments of `tensorrt_llm.LLM`: from the settings, the operator's options and our defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text_generation_proto.values import GrammarKind
from text_generation_shard.adapters import LoraAdapter
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.engine_folder import CompiledEngine
from text_generation_shard.engines.tensorrt_llm.folder import HuggingFaceModel
from text_generation_shard.engines.tensorrt_llm.library import Library
from text_generation_shard.engines.tensorrt_llm.lora import lora_keywords
from text_generation_shard.engines.tensorrt_llm.options import FLAG, split_ranks
from text_generation_shard.engines.tensorrt_llm.parameters import CXX_SAMPLER, EngineCapabilities
from text_generation_shard.engines.tensorrt_llm.speculation import NAME, Speculation, read_speculation

MAX_BATCH_SIZE = 256
"""Default number of sequences in a batch. TensorRT-LLM's default, 2048, allocates buffers and CUDA graphs that most machines
never fill."""
MAX_NUM_TOKENS = 8192
"""Default number of tokens in an iteration; TensorRT-LLM's default."""
TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's default."""
FREE_MEMORY_FRACTION = 0.9
"""Default share of the memory left after the weights that the KV cache takes; TensorRT-LLM's default."""

LONGER = "TLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""TensorRT-LLM's variable (≥ 1.3): 1 allows sequences longer than the model was made for."""
EVENT_BUFFER = 16384
"""Default number of events of the KV cache that are kept for the gateway protocol until they are read."""

FIXED_BY_BUILD = frozenset({"max_seq_len", "max_input_len", "pipeline_parallel_size", NAME})
"""Options refused for compiled engines: 1.2 would silently use the values of the build instead."""


@dataclass(frozen=True, slots=True)
class Construction:
    """The keyword arguments of an engine, and the limits and capabilities that follow from them."""

    keywords: dict[str, Any]
    compiled: bool
    """Use the backend for compiled engines."""
    capabilities: EngineCapabilities
    max_slots: int
    max_num_tokens: int
    max_sequence_length: int
    reserves_max_length: bool
    """Policy GUARANTEED_NO_EVICT, the default: a sequence starts when KV blocks for prompt + max_new_tokens are free (issue #9412)."""
    block_size: int
    """Tokens in a KV block."""
    ranks: int = 1
    """Attention data parallel ranks. Each has a batch and a KV cache of its own, and TensorRT-LLM reports one of them."""

    @property
    def keeps_events(self) -> bool:
        """True if the KV cache makes events."""
        return bool(self.keywords["kv_cache_config"].get("event_buffer_max_size"))


def construct(
    config: ShardConfig,
    library: Library,
    model: HuggingFaceModel,
    options: Mapping[str, object],
    adapters: Sequence[LoraAdapter] = (),
) -> Construction:
    """Return the construction of an engine for a Hugging Face folder. `options` are the operator's. Raises EngineError."""
    folder = Path(config.model_path)
    speculation = read_speculation(library, options)
    if speculation is not None and speculation.kind != "NGram" and options.get("sampler_type") == CXX_SAMPLER:
        # TensorRT-LLM refuses it after the weights are loaded (validate_feature_combination).
        raise EngineError(f"{FLAG}: sampler_type {CXX_SAMPLER} and {NAME} ({speculation.kind}) exclude each other")
    longest = model.max_sequence_length * model.rope_factor
    if _count(options, "max_seq_len", 1) > longest and not (library.calls_workers and os.environ.get(LONGER) == "1"):
        # TensorRT-LLM would reduce it with a warning, and requests would end early.
        raise EngineError(f"{FLAG}: max_seq_len {options['max_seq_len']} exceeds the model's {longest:.0f} positions")
    tensor_parallel, stages = split_ranks(config.tensor_parallel, options)
    keywords: dict[str, Any] = {
        "max_batch_size": config.max_batch_size or MAX_BATCH_SIZE,
        "max_num_tokens": MAX_NUM_TOKENS,
        "max_seq_len": model.max_sequence_length,
        # Without it a prompt longer than max_num_tokens is refused.
        "enable_chunked_prefill": True,
        # The only source of the use of the KV cache and the length of the engine's queue.
        "enable_iter_perf_stats": True,
        **({"guided_decoding_backend": "llguidance"} if _has_guides(folder, speculation) else {}),
        **({"load_format": "DUMMY"} if config.load_format == "dummy" else {}),
    }
    keywords = {name: value for name, value in keywords.items() if name in library.options} | dict(options)
    keywords["kv_cache_config"] = _kv_cache(config, options)
    grammar_backend = keywords.get("guided_decoding_backend")
    keywords |= {
        "model": str(folder),
        "tensor_parallel_size": tensor_parallel,
        **({"pipeline_parallel_size": stages} if stages > 1 else {}),
        **({"gpus_per_node": config.gpus_per_node} if config.gpus_per_node else {}),
        # Only guided decoding needs the texts of the tokens.
        "skip_tokenizer_init": grammar_backend is None,
        "dtype": config.dtype or "auto",
        **({NAME: speculation.argument} if speculation is not None else {}),
        **lora_keywords(adapters, options),
    }
    kinds: tuple[GrammarKind, ...] = (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX)
    if grammar_backend == "llguidance":
        kinds += (GrammarKind.LARK,)
    elif grammar_backend == "xgrammar":
        kinds += (GrammarKind.EBNF, GrammarKind.STRUCTURAL_TAG)
    capabilities = EngineCapabilities(
        penalties=(not library.has_sampler_choice or options.get("sampler_type") == CXX_SAMPLER)
        and not (speculation is not None and speculation.in_model),
        prompt_logprobs=library.has_prompt_logprobs,
        logprobs=speculation is None,
        speculation=speculation,
        longest_prompt=None
        if _splits(keywords, library, model)
        else _count(keywords, "max_num_tokens", MAX_NUM_TOKENS),
        grammar_kinds=() if grammar_backend is None else kinds,
        json_layout=grammar_backend == "llguidance",
    )
    ranks = tensor_parallel if keywords.get("enable_attention_dp") else 1
    return Construction(
        keywords=keywords,
        compiled=False,
        capabilities=capabilities,
        max_slots=_count(keywords, "max_batch_size", MAX_BATCH_SIZE) * ranks,
        block_size=_count(keywords["kv_cache_config"], "tokens_per_block", TOKENS_PER_BLOCK),
        ranks=ranks,
        max_num_tokens=_count(keywords, "max_num_tokens", MAX_NUM_TOKENS),
        max_sequence_length=_count(keywords, "max_seq_len", model.max_sequence_length),
        reserves_max_length=_reserves_max_length(options),
    )


def construct_compiled(config: ShardConfig, built: CompiledEngine, options: Mapping[str, object]) -> Construction:
    """Return the construction for a folder of compiled engines, whose limits the build fixed. Raises EngineError."""
    if config.lora_adapters:
        raise EngineError("--lora-adapters: compiled engines serve none: serve the Hugging Face checkpoint itself")
    if config.dtype not in (None, built.dtype):
        raise EngineError(f"--dtype {config.dtype}: the engines in {config.model_path} were built for {built.dtype}")
    if fixed := sorted(options.keys() & FIXED_BY_BUILD):
        raise EngineError(f"{FLAG}: {fixed[0]} was fixed when the engines in {config.model_path} were built")
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
        capabilities=EngineCapabilities(
            penalties=True,  # this backend always uses the C++ sampler
            prompt_logprobs=False,
            logprobs=built.gather_generation_logits,
            aborts_scored=False,
        ),
        max_slots=min(_count(keywords, "max_batch_size", built.max_batch_size), built.max_batch_size),
        max_num_tokens=min(_count(keywords, "max_num_tokens", built.max_num_tokens), built.max_num_tokens),
        max_sequence_length=built.max_seq_len,
        block_size=built.tokens_per_block,
        reserves_max_length=_reserves_max_length(options),
    )


def _kv_cache(config: ShardConfig, options: Mapping[str, object]) -> dict[str, object]:
    given = options.get("kv_cache_config", {})
    if not isinstance(given, Mapping):
        raise EngineError(f"{FLAG}: kv_cache_config must be a mapping")
    fraction = FREE_MEMORY_FRACTION if config.cuda_memory_fraction == 1 else config.cuda_memory_fraction
    events = {"event_buffer_max_size": EVENT_BUFFER} if config.gateway else {}
    return {"free_gpu_memory_fraction": fraction, **events, **given}


def _has_guides(folder: Path, speculation: Speculation | None) -> bool:
    """Return True if guided decoding is on by default: it needs a fast tokenizer, and slows down engines that draft."""
    return (folder / "tokenizer.json").exists() and not (speculation is not None and speculation.has_draft_engine)


def _splits(keywords: Mapping[str, Any], library: Library, model: HuggingFaceModel) -> bool:
    """Return True if the engine computes a long prompt in chunks."""
    return bool(keywords.get("enable_chunked_prefill")) and library.splits_prompts(mla=model.has_latent_attention)


def _reserves_max_length(options: Mapping[str, object]) -> bool:
    scheduler = options.get("scheduler_config")
    policy = scheduler.get("capacity_scheduler_policy") if isinstance(scheduler, Mapping) else None
    return policy in (None, "GUARANTEED_NO_EVICT")


def _count(keywords: Mapping[str, Any], name: str, default: int) -> int:
    value = keywords.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EngineError(f"{FLAG}: {name} must be a whole number above 0, not {value!r}")
    return value
