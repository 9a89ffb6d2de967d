"""Arguments of LLM. Main at 1.3.0rc28: llmapi/llm_args.py, as its documentation lists them. Types that nothing here
depends on are Any."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
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
    Opaque,
    PeftCacheConfig,
    StrictBaseModel,
    TorchCompileConfig,
)


class WaitingQueuePolicy(StrEnum):
    """Order of requests that are not active yet (PR #12362)."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class PrefillCudaGraphBackend(StrEnum):
    """Known by its default."""

    DISABLED = "disabled"


class BlockReuseConfig(Opaque):
    """Not recorded."""


class MambaStateConfig(Opaque):
    """Not recorded."""


class TelemetryConfig(Opaque):
    """Not recorded."""


class MultimodalConfig(Opaque):
    """Not recorded."""


class ModelExpressConfig(Opaque):
    """Not recorded."""


class GmsConfig(Opaque):
    """Not recorded."""


class LayerwiseBenchmarksConfig(Opaque):
    """Not recorded."""


class KvCacheConfig(StrictBaseModel):
    """The KV cache."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = Field(default=None, min_length=1)
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = Field(default=0.9, ge=0, le=1)
    host_cache_size: int | None = None
    disk_cache_size: int | None = Field(default=None, ge=0)
    disk_cache_path: str | None = None
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    kv_events_config: Any = None
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = Field(default=0, ge=0)
    iteration_stats_interval: int = Field(default=1, gt=0)
    dtype: str = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    mamba_ssm_stochastic_rounding: bool = False
    mamba_ssm_philox_rounds: int = Field(default=10, ge=1)
    tokens_per_block: int = 32
    mamba_state_cache_interval: int | None = Field(default=None, ge=0)
    mamba_state_config: MambaStateConfig = Field(default_factory=MambaStateConfig)
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    enable_swa_scratch_reuse: bool = False
    kv_cache_event_hash_algo: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"] = "auto"
    max_util_for_resume: float = Field(default=0.95, gt=0, le=1)
    enable_kv_pool_rebalance: bool = False
    disk_prefetch_num_reqs: int = Field(default=0, ge=0)
    fp8_context_mla_kv_len_cap: int | None = None
    pool_ratio: list[float] | None = Field(default=None, min_length=1)
    avg_seq_len: int | None = Field(default=None, gt=0)
    block_reuse_config: BlockReuseConfig = Field(default_factory=BlockReuseConfig)


class SchedulerConfig(StrictBaseModel):
    """Who runs."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None
    waiting_queue_policy: WaitingQueuePolicy = WaitingQueuePolicy.FCFS
    use_python_scheduler: bool = False
    enable_prefix_aware_scheduling: bool = True


class DecodeCudaGraphConfig(StrictBaseModel):
    """Which decode batches are captured."""

    batch_sizes: list[int] | None = None
    max_batch_size: int = Field(default=0, ge=0)
    enable_padding: bool = False
    mode: Literal["decode"] = "decode"


CudaGraphConfig = DecodeCudaGraphConfig


class TorchLlmArgs(LlmArgsMethods):
    """Of the only backend there is."""

    model: str | Path
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    custom_tokenizer: str | None = None
    post_processor_hook: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    model_kwargs: dict[str, Any] | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    pp_partition: list[int] | None = None
    cp_config: Any = None
    load_format: str | LoadFormat = LoadFormat.AUTO
    enable_lora: bool = False
    lora_config: Any = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    iter_stats_max_iterations: int | None = Field(default=None, ge=-1)
    request_stats_max_iterations: int | None = Field(default=None, ge=-1)
    peft_cache_config: PeftCacheConfig | None = None
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig | None = None
    sparse_attention_config: Any = None
    kv_cache_compression_config: Any = None
    speculative_config: Any = None
    max_batch_size: int | None = 2048
    max_input_len: int | None = 1024
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    max_num_tokens: int | None = 8192
    gather_generation_logits: bool = False
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    num_serve_frontends: int = Field(default=1, ge=1, le=64)
    reasoning_parser: str | None = None
    decoding_config: Any = None
    mpi_session: Any = Field(default=None, alias="_mpi_session", exclude=True)
    otlp_traces_endpoint: str | None = None
    backend: Literal["pytorch"] = "pytorch"
    return_perf_metrics: bool = False
    perf_metrics_output_dir: str | None = None
    perf_metrics_max_requests: int = Field(default=0, ge=0)
    prometheus_metrics_config: Any = None
    enable_energy_metrics: bool = False
    orchestrator_type: Literal["rpc", "ray"] | None = None
    env_overrides: dict[str, str] | None = None
    telemetry_config: TelemetryConfig = Field(default_factory=TelemetryConfig)
    generation_config: Literal["auto", "trtllm"] = "trtllm"
    garbage_collection_gen0_threshold: int = 20000
    cuda_graph_config: DecodeCudaGraphConfig | None = Field(default_factory=DecodeCudaGraphConfig)
    encoder_cuda_graph_config: Any = None
    enable_encoder_decoder_mixed_cuda_graph: bool = True
    multimodal_config: MultimodalConfig = Field(default_factory=MultimodalConfig)
    attention_dp_config: AttentionDpConfig | None = None
    disable_overlap_scheduler: bool = False
    enable_return_routed_experts: bool = False
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    nvfp4_gemm_config: Nvfp4GemmConfig = Field(default_factory=Nvfp4GemmConfig)
    dwdp_config: Any = None
    encoder_max_batch_size: int | None = None
    encoder_max_num_tokens: int | None = None
    attn_backend: str = "TRTLLM"
    enable_mla_skip_correction: bool = False
    mla_skip_correction_threshold: float = Field(default=8.0, gt=0, le=32)
    sampler_force_async_worker: bool = False
    enable_in_graph_sampling: bool = False
    enable_speculative_beam_history_d2h: bool = False
    enable_early_first_token_response: bool = False
    enable_low_latency_host_dispatch: bool = False
    enable_iter_perf_stats: bool = False
    enable_tokenization_cache: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    batch_wait_timeout_ms: float = Field(default=0, ge=0)
    batch_wait_timeout_iters: int = Field(default=0, ge=0)
    batch_wait_max_tokens_ratio: float = Field(default=0, ge=0, le=1)
    torch_compile_config: TorchCompileConfig | None = None
    prefill_cuda_graph_backend: PrefillCudaGraphBackend = PrefillCudaGraphBackend.DISABLED
    prefill_capture_num_tokens: list[int] | None = None
    enable_autotuner: bool = True
    use_fine_grained_sync: bool = False
    enable_layerwise_nvtx_marker: bool = False
    enable_min_latency: bool = False
    stream_interval: int = Field(default=1, gt=0)
    force_dynamic_quantization: bool = False
    allreduce_strategy: (
        Literal["AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"]
        | None
    ) = "AUTO"
    checkpoint_loader: Any = None
    checkpoint_format: str | None = None
    checkpoint_io_policy: Literal["auto", "native", "rank_striped_read_ahead"] = "auto"
    mx_config: ModelExpressConfig = Field(default_factory=ModelExpressConfig)
    gms_config: GmsConfig = Field(default_factory=GmsConfig)
    kv_connector_config: Any = None
    mm_encoder_only: bool = False
    disable_mm_encoder: bool = False
    encode_only: bool = False
    ray_worker_extension_cls: str | None = None
    ray_placement_config: Any = None
    ray_worker_nsight_options: dict[str, str] | None = None
    sleep_config: Any = None
    reorder_policy_config: Any = None
    enable_resource_governor: bool = False
    use_cute_dsl_blockscaling_mm: bool = False
    use_cute_dsl_blockscaling_bmm: bool = False
    use_cute_dsl_bf16_bmm: bool = False
    use_cute_dsl_bf16_gemm: bool = False
    max_stats_len: int = Field(default=1000, ge=-1)
    layer_wise_benchmarks_config: LayerwiseBenchmarksConfig = Field(default_factory=LayerwiseBenchmarksConfig)


LlmArgs = TorchLlmArgs
