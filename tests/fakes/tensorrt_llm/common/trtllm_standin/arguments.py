"""What both releases' argument classes build on. 1.2.1: llmapi/llm_args.py; enum members as strings, by their names."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class StrictBaseModel(BaseModel):
    """Refuses a field that it does not know."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class Opaque(StrictBaseModel):
    """A configuration whose fields were not recorded: there is none to set."""


class NameOnly:
    """A class that can be imported, and nothing more."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(f"the stand-in knows {type(self).__name__} by its name only")


def by_name_only(name: str, module: str) -> type[NameOnly]:
    """Such a class."""
    return type(name, (NameOnly,), {"__module__": module, "__doc__": "See NameOnly."})


class CapacitySchedulerPolicy(StrEnum):
    """How the KV cache is reserved."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class ContextChunkingPolicy(StrEnum):
    """Whose chunk comes first."""

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class LoadFormat(Enum):
    """Where weights come from."""

    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2


class DynamicBatchConfig(StrictBaseModel):
    """For the TensorRT backend."""

    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: int


class PeftCacheConfig(StrictBaseModel):
    """Cache of adapters."""

    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float = 0.02
    host_cache_size: int = 1073741824
    lora_prefetch_dir: str | None = None


class CacheTransceiverConfig(StrictBaseModel):
    """Disaggregated serving."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = Field(default=None, gt=0)
    kv_transfer_sender_future_timeout_ms: int | None = Field(default=1000, gt=0)


class TorchCompileConfig(StrictBaseModel):
    """torch.compile."""

    enable_fullgraph: bool = True
    enable_inductor: bool = False
    enable_piecewise_cuda_graph: bool = False
    capture_num_tokens: list[int] | None = None
    enable_userbuffers: bool = True
    max_num_streams: int = 1


class AttentionDpConfig(StrictBaseModel):
    """Data parallel attention."""

    enable_balance: bool = False
    timeout_iters: int = 50
    batching_wait_iters: int = 10


class MoeConfig(StrictBaseModel):
    """Mixtures of experts."""

    backend: Literal["CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"] = "CUTLASS"
    max_num_tokens: int | None = None
    load_balancer: Any = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class Nvfp4GemmConfig(StrictBaseModel):
    """NVFP4 products."""

    allowed_backends: list[str] = ["cutlass", "cublaslt", "cuda_core"]


class _ParallelConfig(StrictBaseModel):
    """How the model is spread."""

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    gpus_per_node: int = 8
    moe_cluster_size: int = -1
    moe_tp_size: int = -1
    moe_ep_size: int = -1
    cp_config: dict[str, Any] = Field(default_factory=dict)
    pp_partition: list[int] | None = None
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def is_multi_gpu(self) -> bool:
        """Whether there is more than one rank."""
        return self.world_size > 1


class LlmArgsMethods(StrictBaseModel):
    """What the argument classes of both releases can do."""

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:  # noqa: ANN401 - of any type
        """Arguments as the constructor of LLM got them."""
        return cls(**kwargs)

    @property
    def parallel_config(self) -> _ParallelConfig:
        """How the model is spread."""
        values = self.__dict__
        return _ParallelConfig(
            tp_size=values["tensor_parallel_size"],
            pp_size=values["pipeline_parallel_size"],
            cp_size=values["context_parallel_size"],
            gpus_per_node=values["gpus_per_node"] or 8,
        )
