"""What callers import. Main at 1.3.0rc28: the pages of llm-api/reference."""

from __future__ import annotations

from trtllm_standin.arguments import (
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    DynamicBatchConfig,
    MoeConfig,
    by_name_only,
)

from tensorrt_llm.conversation_params import ConversationParams
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import CompletionOutput
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import (
    CudaGraphConfig,
    DecodeCudaGraphConfig,
    KvCacheConfig,
    LlmArgs,
    MultimodalConfig,
    SchedulerConfig,
    TorchLlmArgs,
)
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams

AsyncLLM = by_name_only("AsyncLLM", __name__)
KvCacheRetentionConfig = by_name_only("KvCacheRetentionConfig", __name__)
KVEventsConfig = by_name_only("KVEventsConfig", __name__)
EncodeCudaGraphConfig = by_name_only("EncodeCudaGraphConfig", __name__)
QuantConfig = by_name_only("QuantConfig", __name__)
QuantAlgo = by_name_only("QuantAlgo", __name__)
CalibConfig = by_name_only("CalibConfig", __name__)
MpiCommSession = by_name_only("MpiCommSession", __name__)
PrometheusMetricsConfig = by_name_only("PrometheusMetricsConfig", __name__)

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheTransceiverConfig",
    "CalibConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "ConversationParams",
    "CudaGraphConfig",
    "DecodeCudaGraphConfig",
    "DisaggregatedParams",
    "DynamicBatchConfig",
    "EncodeCudaGraphConfig",
    "GuidedDecodingParams",
    "KVEventsConfig",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "LlmArgs",
    "LoRARequest",
    "MoeConfig",
    "MpiCommSession",
    "MultimodalConfig",
    "PrometheusMetricsConfig",
    "QuantAlgo",
    "QuantConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulingParams",
    "TorchLlmArgs",
]
