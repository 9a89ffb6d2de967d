"""The LLM. Signatures of main at 1.3.0rc28: llmapi/llm.py."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from trtllm_standin.arguments import by_name_only
from trtllm_standin.llm import RequestOutputMethods, StandInLLM
from trtllm_standin.release import V1_3

from tensorrt_llm.conversation_params import ConversationParams
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor import DetokenizedGenerationResultBase, GenerationExecutor, GenerationResult
from tensorrt_llm.executor.request import DEFAULT_REQUEST_PRIORITY, LoRARequest, PromptAdapterRequest
from tensorrt_llm.inputs import PromptInputs
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs, WaitingQueuePolicy
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams

PreprocessedInputs = by_name_only("PreprocessedInputs", __name__)


class RequestOutput(RequestOutputMethods, DetokenizedGenerationResultBase, GenerationResult):
    """What generate_async returns. Nobody else makes one."""


class _TorchLLM(StandInLLM):
    """The only backend."""

    release = V1_3
    executor_class = GenerationExecutor
    sampling_class = SamplingParams
    output_class = RequestOutput

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,  # noqa: ANN401 - a path, or one of several tokenizers
        tokenizer_mode: Literal["auto", "slow"] = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,  # noqa: ANN401 - the fields of TorchLlmArgs
    ) -> None:
        arguments = {
            "model": model,
            "tokenizer": tokenizer,
            "tokenizer_mode": tokenizer_mode,
            "skip_tokenizer_init": skip_tokenizer_init,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "revision": revision,
            "tokenizer_revision": tokenizer_revision,
        }
        self._construct(TorchLlmArgs, arguments, kwargs)
        self.disaggregated_params: dict[str, Any] = {}
        self.startup_metrics: dict[str, float] = {}

    def generate(
        self,
        inputs: PromptInputs | Sequence[PromptInputs],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest] | None = None,
        prompt_adapter_request: PromptAdapterRequest | Sequence[PromptAdapterRequest] | None = None,
        kv_cache_retention_config: Any = None,  # noqa: ANN401 - a binding
        disaggregated_params: DisaggregatedParams | Sequence[DisaggregatedParams] | None = None,
        scheduling_params: SchedulingParams | list[SchedulingParams] | None = None,
        conversation_params: ConversationParams | list[ConversationParams] | None = None,
        cache_salt: str | Sequence[str] | None = None,
        priority: float | list[float] = DEFAULT_REQUEST_PRIORITY,
    ) -> RequestOutput | list[RequestOutput]:
        """Answers, waited for in this thread."""
        if any(not 0 <= one <= 1 for one in (priority if isinstance(priority, list) else [priority])):
            raise ValueError(f"priority must be in [0, 1], got {priority}")
        each = {
            "sampling_params": sampling_params,
            "lora_request": lora_request,
            "prompt_adapter_request": prompt_adapter_request,
            "kv_cache_retention_config": kv_cache_retention_config,
            "disaggregated_params": disaggregated_params,
            "scheduling_params": scheduling_params,
            "conversation_params": conversation_params,
            "cache_salt": cache_salt,
            "priority": priority,
        }
        return self._generate(inputs, each)  # type: ignore[no-any-return]

    def generate_async(
        self,
        inputs: PromptInputs,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,  # noqa: ANN401 - a binding
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,  # noqa: ANN401 - not imitated
        scheduling_params: SchedulingParams | None = None,
        conversation_params: ConversationParams | None = None,
        cache_salt: str | None = None,
        priority: float = DEFAULT_REQUEST_PRIORITY,
    ) -> RequestOutput:
        """Submit a request: a plain function, that returns at once."""
        is_ordered = self.args.scheduler_config.waiting_queue_policy is WaitingQueuePolicy.PRIORITY
        if priority != DEFAULT_REQUEST_PRIORITY and not is_ordered:
            warnings.warn("priority is ignored: waiting_queue_policy is fcfs", stacklevel=2)
        return self._submit(  # type: ignore[no-any-return]
            inputs,
            sampling_params,
            streaming=streaming,
            refused={
                "lora_request": lora_request,
                "prompt_adapter_request": prompt_adapter_request,
                "disaggregated_params": disaggregated_params,
                "_postproc_params": _postproc_params,
                "conversation_params": conversation_params,
            },
            trace_headers=trace_headers,
            cache_salt=cache_salt,
            priority=priority,
        )

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Size of the KV cache; needs neither statistics nor a request."""
        return self._executor.get_kv_cache_capacity()  # type: ignore[no-any-return]

    def preprocess(
        self,
        inputs: PromptInputs,
        sampling_params: SamplingParams | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
    ) -> NoReturn:
        """Not imitated."""
        raise NotImplementedError("the stand-in has no preprocess")

    def get_data_transceiver_state(self) -> NoReturn:
        """Not imitated."""
        raise NotImplementedError("the stand-in has no get_data_transceiver_state")

    def start_profile(
        self,
        output_dir: str | None = None,
        num_steps: int | None = None,
        start_step: int = 0,
        activities: list[str] | None = None,
    ) -> NoReturn:
        """Not imitated."""
        raise NotImplementedError("the stand-in has no start_profile")

    def stop_profile(self) -> NoReturn:
        """Not imitated."""
        raise NotImplementedError("the stand-in has no stop_profile")

    def _check_health(self) -> bool:
        """Asks the executor, which knows of its workers' death."""
        return self._executor is not None and self._executor.check_health()


class LLM(_TorchLLM):
    """The one that the package exports."""
