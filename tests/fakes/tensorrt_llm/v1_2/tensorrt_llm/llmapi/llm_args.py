"""Arguments of LLM. 1.2.1: llmapi/llm_args.py. Types that nothing here depends on are Any."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from trtllm_standin.arguments import (
    AttentionDpConfig,
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    DynamicBatchConfig,
    LlmArgsMethods,
    LoadFormat,
    MoeConfig,
    Nvfp4GemmConfig,
    PeftCacheConfig,
    StrictBaseModel,
    TorchCompileConfig,
)


class BatchingType(StrEnum):
    """For the TensorRT backend."""

    STATIC = "STATIC"
    INFLIGHT = "INFLIGHT"


class SamplerType(StrEnum):
    """auto is the TorchSampler, except with beam search (docs/source/features/sampling.md)."""

    TRTLLMSampler = "TRTLLMSampler"
    TorchSampler = "TorchSampler"
    auto = "auto"


class KvCacheConfig(StrictBaseModel):
    """The KV cache."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    tokens_per_block: int = 32

    @field_validator("free_gpu_memory_fraction")
    @classmethod
    def _check_fraction(cls, value: float | None) -> float | None:
        # None, though its type allows it, is compared with a number: a TypeError, as there.
        if not 0 <= value <= 1:  # type: ignore[operator]
            raise ValueError("kv_cache_config.free_gpu_memory_fraction must be a float between 0 and 1")
        return value


class SchedulerConfig(StrictBaseModel):
    """Who runs."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None


class CudaGraphConfig(StrictBaseModel):
    """Which decode batches are captured."""

    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False

    @field_validator("max_batch_size")
    @classmethod
    def _check_size(cls, value: int) -> int:
        if value < 0:
            raise ValueError("cuda_graph_config.max_batch_size must be non-negative")
        return value


class BuildConfig(StrictBaseModel):
    """Limits of a compiled engine. Nothing is compiled here; a compiled one's config.json has them under these names."""

    max_input_len: int = 1024
    max_seq_len: int | None = None
    opt_batch_size: int = 8
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    opt_num_tokens: int | None = None
    gather_context_logits: bool = False
    gather_generation_logits: bool = False


class BaseLlmArgs(LlmArgsMethods):
    """What both backends take."""

    model: str | Path
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    custom_tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    pp_partition: list[int] | None = None
    cp_config: dict[str, Any] | None = Field(default_factory=dict)
    load_format: Any = "auto"
    fail_fast_on_attention_window_too_large: bool = False
    enable_lora: bool = False
    lora_config: Any = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    peft_cache_config: PeftCacheConfig | None = None
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig | None = None
    sparse_attention_config: Any = None
    speculative_config: Any = None
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_beam_width: int | None = None
    max_num_tokens: int | None = 8192
    gather_generation_logits: bool = False
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    reasoning_parser: str | None = None
    decoding_config: Any = None
    mpi_session: Any = Field(default=None, alias="_mpi_session", exclude=True)
    otlp_traces_endpoint: str | None = None
    backend: str | None = None
    return_perf_metrics: bool = False
    orchestrator_type: Literal["rpc", "ray"] | None = None
    env_overrides: dict[str, str] | None = None

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        """What validators make of None."""
        self.__dict__["max_input_len"] = self.max_input_len or 1024
        self.__dict__["gpus_per_node"] = self.gpus_per_node or 8
        return self


class TorchLlmArgs(BaseLlmArgs):
    """Of the PyTorch backend."""

    garbage_collection_gen0_threshold: int = 20000
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    attention_dp_config: AttentionDpConfig | None = None
    disable_overlap_scheduler: bool = False
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    nvfp4_gemm_config: Nvfp4GemmConfig = Field(default_factory=Nvfp4GemmConfig)
    attn_backend: str = "TRTLLM"
    sampler_type: str | SamplerType = SamplerType.auto
    sampler_force_async_worker: bool = False
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    perf_metrics_max_requests: int = 0
    batch_wait_timeout_ms: float = 0
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0
    torch_compile_config: TorchCompileConfig | None = None
    enable_autotuner: bool = True
    enable_layerwise_nvtx_marker: bool = False
    load_format: str | LoadFormat = LoadFormat.AUTO
    enable_min_latency: bool = False
    stream_interval: int = 1
    force_dynamic_quantization: bool = False
    allreduce_strategy: (
        Literal["AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"]
        | None
    ) = "AUTO"
    checkpoint_loader: Any = None
    checkpoint_format: str | None = None
    kv_connector_config: Any = None
    mm_encoder_only: bool = False
    ray_worker_extension_cls: str | None = None
    ray_placement_config: Any = Field(default=None, exclude=True)
    enable_sleep: bool = False
    disable_flashinfer_sampling: bool = False
    max_stats_len: int = 1000

    @field_validator("load_format", mode="before")
    @classmethod
    def _read_load_format(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.upper() not in LoadFormat.__members__:
            raise ValueError(f"Invalid LoadFormat: {value}")
        return LoadFormat[value.upper()]

    @field_validator("stream_interval")
    @classmethod
    def _check_interval(cls, value: int) -> int:
        if value <= 0:
            raise ValueError(f"stream_interval must be positive, got {value}")
        return value

    @model_validator(mode="after")
    def _fill_in_torch(self) -> Self:
        """What validators make of None; and graphs, of which sizes and the largest have to agree."""
        self.__dict__["max_batch_size"] = self.max_batch_size or 2048
        self.__dict__["max_beam_width"] = self.max_beam_width or 1
        self.__dict__["backend"] = self.backend or "pytorch"
        graphs = self.cuda_graph_config
        if graphs is not None and graphs.batch_sizes and graphs.max_batch_size not in (0, max(graphs.batch_sizes)):
            raise ValueError("cuda_graph_config.batch_sizes and cuda_graph_config.max_batch_size do not agree")
        return self


class TrtLlmArgs(BaseLlmArgs):
    """Of the TensorRT backend."""

    load_format: Literal["auto", "dummy"] = "auto"
    enable_tqdm: bool = False
    workspace: str | None = None
    enable_build_cache: Any = False
    extended_runtime_perf_knob_config: Any = None
    calib_config: Any = None
    quant_config: Any = None
    embedding_parallel_mode: str = "SHARDING_ALONG_VOCAB"
    fast_build: bool = False
    build_config: BuildConfig | None = None
    enable_prompt_adapter: bool = False
    max_prompt_adapter_token: int = 0
    batching_type: BatchingType | None = None
    normalize_log_probs: bool = False

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        assert self.kv_cache_config.dtype == "auto", "KvCacheConfig.dtype is not supported by the TensorRT backend."
        return self


LlmArgs = TorchLlmArgs
