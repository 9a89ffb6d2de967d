"""The keyword arguments of `tensorrt_llm.LLM`: from the settings, the operator's options and our defaults."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text_generation_proto.values import GrammarKind
from text_generation_shard.adapters import LoraAdapter
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, EngineInfo, Scheduling
from text_generation_shard.engines.tensorrt_llm.engine_folder import CompiledEngine
from text_generation_shard.engines.tensorrt_llm.folder import HuggingFaceModel
from text_generation_shard.engines.tensorrt_llm.library import Library
from text_generation_shard.engines.tensorrt_llm.lora import lora_keywords
from text_generation_shard.engines.tensorrt_llm.options import FLAG, split_ranks
from text_generation_shard.engines.tensorrt_llm.parameters import CXX_SAMPLER, MAX_LOGPROBS, EngineCapabilities
from text_generation_shard.engines.tensorrt_llm.speculation import BESIDE_MODEL, NAME, read_speculation
from text_generation_shard.json_object import is_count

MAX_BATCH_SIZE = 256
"""Default number of sequences in a batch. TensorRT-LLM's default, 2048, allocates buffers and CUDA graphs that most machines
never fill."""
MAX_NUM_TOKENS = 8192
"""Default number of tokens in an iteration; TensorRT-LLM's default."""
TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's default."""
FREE_MEMORY_FRACTION = 0.9
"""Default share of the memory left after the weights that the KV cache takes; TensorRT-LLM's default."""
STAR_ATTENTION = "FLASHINFER_STAR_ATTENTION"
"""The attention backend with which prompts are not computed in chunks (py_executor_creator.py near 1.2.1)."""
LONGER = "TLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""TensorRT-LLM's variable (≥ 1.3): 1 allows sequences longer than the model was made for."""
MORE_KINDS = {"llguidance": (GrammarKind.LARK,), "xgrammar": (GrammarKind.EBNF, GrammarKind.STRUCTURAL_TAG)}
"""Kinds of grammars that only this backend follows."""
FIXED_BY_BUILD = frozenset({"max_seq_len", "max_input_len", "tensor_parallel_size", "pipeline_parallel_size", NAME})
"""Options refused for compiled engines: 1.2 would silently use the values of the build instead."""


@dataclass(frozen=True, slots=True)
class Construction:
    """The keyword arguments of an engine, and the description and capabilities that follow from them."""

    keywords: dict[str, Any]
    capabilities: EngineCapabilities
    info: EngineInfo

    @property
    def windows(self) -> int:
        """Sizes of attention windows: each has as many KV blocks as the others (calculateMaxNumBlocks, kvCacheManager.cpp)."""
        given = self.keywords["kv_cache_config"].get("max_attention_window") or ()
        return len({min(window, self.info.max_sequence_length) for window in given}) or 1


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
    tensor_parallel, stages = split_ranks(config.tensor_parallel, options)
    if speculation is not None and stages > 1:
        # TensorRT-LLM refuses some drafters after the weights are loaded; its feature matrix excludes all of them.
        raise EngineError(f"{FLAG}: pipeline_parallel_size and {NAME} ({speculation.kind}) exclude each other")
    if speculation and speculation.kind not in BESIDE_MODEL and options.get("sampler_type") == CXX_SAMPLER:
        # TensorRT-LLM refuses it after the weights are loaded (validate_feature_combination).
        raise EngineError(f"{FLAG}: sampler_type {CXX_SAMPLER} and {NAME} ({speculation.kind}) exclude each other")
    longest = model.max_sequence_length * model.rope_factor
    if _count(options, "max_seq_len", 1) > longest and not (library.calls_workers and os.environ.get(LONGER) == "1"):
        # TensorRT-LLM would reduce it with a warning, and requests would end early.
        raise EngineError(f"{FLAG}: max_seq_len {options['max_seq_len']} exceeds the model's {longest:.0f} positions")
    # Guided decoding needs a fast tokenizer, and slows down engines that draft.
    has_guides = (folder / "tokenizer.json").exists() and not (speculation and speculation.has_draft_engine)
    keywords: dict[str, Any] = {
        "max_batch_size": config.max_batch_size or MAX_BATCH_SIZE,
        "max_num_tokens": MAX_NUM_TOKENS,
        "max_seq_len": model.max_sequence_length,
        # Without it a prompt longer than max_num_tokens is refused.
        "enable_chunked_prefill": True,
        # The only source of the use of the KV cache and the length of the engine's queue.
        "enable_iter_perf_stats": True,
        # Otherwise generation_config.json fills in parameters that are left out here because they are neutral.
        "generation_config": "trtllm",
        # The engine makes no spans of requests without metrics.
        **({"return_perf_metrics": True} if options.get("otlp_traces_endpoint") else {}),
        **({"guided_decoding_backend": "llguidance"} if has_guides else {}),
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
        **lora_keywords(config, adapters, options),
    }
    splits = keywords.get("enable_chunked_prefill") and keywords.get("attn_backend") != STAR_ATTENTION
    kinds = (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, *MORE_KINDS.get(str(grammar_backend), ()))
    capabilities = EngineCapabilities(
        penalties=(not library.has_sampler_choice or options.get("sampler_type") == CXX_SAMPLER)
        and not (speculation is not None and speculation.in_model),
        prompt_logprobs=library.has_prompt_logprobs,
        logprobs=speculation is None,
        speculation=speculation,
        longest_prompt=None
        if splits and library.splits_prompts(mla=model.has_latent_attention)
        else _count(keywords, "max_num_tokens", MAX_NUM_TOKENS),
        grammar_kinds=() if grammar_backend is None else kinds,
    )
    ranks = tensor_parallel if keywords.get("enable_attention_dp") else 1
    info = _info(
        config,
        model,
        options,
        capabilities,
        max_slots=_count(keywords, "max_batch_size", MAX_BATCH_SIZE) * ranks,
        block_size=_count(keywords["kv_cache_config"], "tokens_per_block", TOKENS_PER_BLOCK),
        suggested_prefill_tokens=_count(keywords, "max_num_tokens", MAX_NUM_TOKENS),
        max_sequence_length=_count(keywords, "max_seq_len", model.max_sequence_length),
        adapters=tuple(adapter.name for adapter in adapters),
        ranks=ranks,
    )
    return Construction(keywords, capabilities, info)


def construct_compiled(config: ShardConfig, built: CompiledEngine, options: Mapping[str, object]) -> Construction:
    """Return the construction for a folder of compiled engines, whose limits the build fixed. Raises EngineError."""
    if config.lora_slots:
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
    capabilities = EngineCapabilities(
        penalties=True,  # this backend always uses the C++ sampler
        prompt_logprobs=False,
        logprobs=built.gather_generation_logits,
        aborts_scored=False,
    )
    info = _info(
        config,
        built,
        options,
        capabilities,
        max_slots=min(_count(keywords, "max_batch_size", built.max_batch_size), built.max_batch_size),
        suggested_prefill_tokens=min(_count(keywords, "max_num_tokens", built.max_num_tokens), built.max_num_tokens),
        max_sequence_length=built.max_sequence_length,
        block_size=built.tokens_per_block,
    )
    return Construction(keywords, capabilities, info)


def _info(
    config: ShardConfig,
    model: HuggingFaceModel | CompiledEngine,
    options: Mapping[str, object],
    capabilities: EngineCapabilities,
    **limits: Any,  # noqa: ANN401 - fields of EngineInfo
) -> EngineInfo:
    scheduler = options.get("scheduler_config")
    policy = scheduler.get("capacity_scheduler_policy") if isinstance(scheduler, Mapping) else None
    return EngineInfo(
        engine="tensorrt-llm",
        model_id=config.model_id or config.model_path,
        model_type=model.model_type,
        dtype=config.dtype or model.dtype,
        device="cuda",
        scheduling=Scheduling.SELF,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_top_n_tokens=MAX_LOGPROBS if capabilities.logprobs else 0,
        grammar_kinds=capabilities.grammar_kinds,
        unsupported=capabilities.unsupported,
        # With the default policy a sequence starts when KV blocks for prompt + max_new_tokens are free (issue #9412).
        reserves_max_length=policy in (None, "GUARANTEED_NO_EVICT"),
        **limits,
    )


def _kv_cache(config: ShardConfig, options: Mapping[str, object]) -> dict[str, object]:
    given = options.get("kv_cache_config", {})
    if not isinstance(given, Mapping):
        raise EngineError(f"{FLAG}: kv_cache_config must be a mapping")
    fraction = FREE_MEMORY_FRACTION if config.cuda_memory_fraction == 1 else config.cuda_memory_fraction
    if given.get("event_buffer_max_size"):
        raise EngineError(f"{FLAG}: kv_cache_config: event_buffer_max_size is not set here: nothing reads the events")
    return {"free_gpu_memory_fraction": fraction, **given}


def _count(keywords: Mapping[str, Any], name: str, default: int) -> int:
    value = keywords.get(name, default)
    if not is_count(value):
        raise EngineError(f"{FLAG}: {name} must be a whole number above 0, not {value!r}")
    return value
