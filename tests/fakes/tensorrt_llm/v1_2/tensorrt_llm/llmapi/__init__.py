"""What callers import. 1.2.1: llm-api/reference.rst lists it."""

from __future__ import annotations

from trtllm_standin.arguments import (
    AttentionDpConfig,
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    DynamicBatchConfig,
    MoeConfig,
    TorchCompileConfig,
    by_name_only,
)

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import CompletionOutput
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import (
    BatchingType,
    BuildConfig,
    CudaGraphConfig,
    KvCacheConfig,
    LlmArgs,
    SchedulerConfig,
    TorchLlmArgs,
    TrtLlmArgs,
)
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

AsyncLLM = by_name_only("AsyncLLM", __name__)
MultimodalEncoder = by_name_only("MultimodalEncoder", __name__)
KvCacheRetentionConfig = by_name_only("KvCacheRetentionConfig", __name__)
LookaheadDecodingConfig = by_name_only("LookaheadDecodingConfig", __name__)
MedusaDecodingConfig = by_name_only("MedusaDecodingConfig", __name__)
EagleDecodingConfig = by_name_only("EagleDecodingConfig", __name__)
MTPDecodingConfig = by_name_only("MTPDecodingConfig", __name__)
QuantConfig = by_name_only("QuantConfig", __name__)
QuantAlgo = by_name_only("QuantAlgo", __name__)
CalibConfig = by_name_only("CalibConfig", __name__)
BuildCacheConfig = by_name_only("BuildCacheConfig", __name__)
MpiCommSession = by_name_only("MpiCommSession", __name__)
ExtendedRuntimePerfKnobConfig = by_name_only("ExtendedRuntimePerfKnobConfig", __name__)
NGramDecodingConfig = by_name_only("NGramDecodingConfig", __name__)
UserProvidedDecodingConfig = by_name_only("UserProvidedDecodingConfig", __name__)
DraftTargetDecodingConfig = by_name_only("DraftTargetDecodingConfig", __name__)
AutoDecodingConfig = by_name_only("AutoDecodingConfig", __name__)
SaveHiddenStatesDecodingConfig = by_name_only("SaveHiddenStatesDecodingConfig", __name__)
RocketSparseAttentionConfig = by_name_only("RocketSparseAttentionConfig", __name__)
DeepSeekSparseAttentionConfig = by_name_only("DeepSeekSparseAttentionConfig", __name__)
SkipSoftmaxAttentionConfig = by_name_only("SkipSoftmaxAttentionConfig", __name__)

__all__ = [
    "LLM",
    "AsyncLLM",
    "AttentionDpConfig",
    "AutoDecodingConfig",
    "BatchingType",
    "BuildCacheConfig",
    "BuildConfig",
    "CacheTransceiverConfig",
    "CalibConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DeepSeekSparseAttentionConfig",
    "DisaggregatedParams",
    "DraftTargetDecodingConfig",
    "DynamicBatchConfig",
    "EagleDecodingConfig",
    "ExtendedRuntimePerfKnobConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "LlmArgs",
    "LoRARequest",
    "LookaheadDecodingConfig",
    "MTPDecodingConfig",
    "MedusaDecodingConfig",
    "MoeConfig",
    "MpiCommSession",
    "MultimodalEncoder",
    "NGramDecodingConfig",
    "QuantAlgo",
    "QuantConfig",
    "RequestError",
    "RequestOutput",
    "RocketSparseAttentionConfig",
    "SamplingParams",
    "SaveHiddenStatesDecodingConfig",
    "SchedulerConfig",
    "SkipSoftmaxAttentionConfig",
    "TorchCompileConfig",
    "TorchLlmArgs",
    "TrtLlmArgs",
    "UserProvidedDecodingConfig",
]
