"""The LLM. Signatures of 1.2.1: llmapi/llm.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trtllm_standin.llm import RequestOutputMethods, StandInLLM
from trtllm_standin.release import V1_2

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor import DetokenizedGenerationResultBase, GenerationExecutor, GenerationResult
from tensorrt_llm.executor.request import LoRARequest, PromptAdapterRequest
from tensorrt_llm.inputs import PromptInputs
from tensorrt_llm.llmapi.engine_folder import EngineFolderLLM
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs, TrtLlmArgs
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams


class RequestOutput(RequestOutputMethods, DetokenizedGenerationResultBase, GenerationResult):
    """What generate_async returns. Nobody else makes one."""


class BaseLLM(StandInLLM):
    """Both backends."""

    release = V1_2
    executor_class = GenerationExecutor
    sampling_class = SamplingParams
    output_class = RequestOutput
    args_class: type[TorchLlmArgs] | type[TrtLlmArgs] = TorchLlmArgs

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
        **kwargs: Any,  # noqa: ANN401 - the fields of the arguments' class
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
        self._construct(self.args_class, arguments, kwargs)

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
        cache_salt: str | Sequence[str] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answers, waited for in this thread."""
        each = {
            "sampling_params": sampling_params,
            "lora_request": lora_request,
            "prompt_adapter_request": prompt_adapter_request,
            "kv_cache_retention_config": kv_cache_retention_config,
            "disaggregated_params": disaggregated_params,
            "scheduling_params": scheduling_params,
            "cache_salt": cache_salt,
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
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Submit a request: a plain function, that returns at once."""
        return self._submit(  # type: ignore[no-any-return]
            inputs,
            sampling_params,
            streaming=streaming,
            refused={
                "lora_request": lora_request,
                "prompt_adapter_request": prompt_adapter_request,
                "disaggregated_params": disaggregated_params,
                "_postproc_params": _postproc_params,
            },
            trace_headers=trace_headers,
            cache_salt=cache_salt,
        )


class _TorchLLM(BaseLLM):
    """The PyTorch backend."""

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,  # noqa: ANN401 - see BaseLLM
        tokenizer_mode: Literal["auto", "slow"] = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,  # noqa: ANN401 - see BaseLLM
    ) -> None:
        if kwargs.get("backend") == "tensorrt":
            raise NotImplementedError(
                "the stand-in has no TensorRT backend on this class: tensorrt_llm._tensorrt_engine"
            )
        foreign = [key for key in kwargs if key in TrtLlmArgs.model_fields and key not in TorchLlmArgs.model_fields]
        if foreign:
            raise ValueError(
                "The following arguments are specific to TensorRT backend and cannot be used with PyTorch backend: "
                f"{foreign}.\nPlease use 'from tensorrt_llm._tensorrt_engine import LLM' instead to use the TensorRT backend."
            )
        super().__init__(
            model,
            tokenizer,
            tokenizer_mode,
            skip_tokenizer_init,
            trust_remote_code,
            tensor_parallel_size,
            dtype,
            revision,
            tokenizer_revision,
            **kwargs,
        )


class LLM(_TorchLLM):
    """The one that the package exports."""


class _TrtLLM(EngineFolderLLM, BaseLLM):
    """The TensorRT backend, of compiled engines."""

    args_class = TrtLlmArgs
