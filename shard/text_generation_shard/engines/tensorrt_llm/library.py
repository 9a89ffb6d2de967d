"""The installed TensorRT-LLM: import it and determine what it supports.

Features are detected by the presence of names, not by version numbers. This is the only module that imports TensorRT-LLM, and only
the shard that runs this engine calls it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any, cast

from text_generation_common.one_line import typed_line
from text_generation_shard.engine import EngineError

LLM = Any
"""TensorRT-LLM's LLM, which is not typed here."""
MLA_CHUNKS = frozenset({(9, 0), (10, 0), (10, 3), (12, 0)})
"""Compute capabilities of the GPUs on which prompts of models with multi-head latent attention are computed in chunks."""
DECODING_CONFIGS = ("MTP", "Eagle", "Eagle3", "NGram", "DraftTarget", "Auto", "SA", "PARD", "DFlash", "DSpark")
"""The drafters that are served, where the release has them. Others need the backend for compiled engines or a Python object."""
NESTED_OPTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cuda_graph_config": "CudaGraphConfig",
}
"""Options that are pydantic models themselves → the name of their class."""


@dataclass(frozen=True, slots=True)
class Library:
    """The names that this engine uses of TensorRT-LLM, and the options of the installed version."""

    version: str
    llm: type[Any]
    """The class LLM of the PyTorch backend."""
    engine_llm: type[Any] | None
    """The class LLM of the backend for compiled engines; None if absent (≥ 1.3)."""
    sampling_params: type[Any]
    guided_decoding_params: type[Any]
    request_error: type[Exception]
    options: Mapping[str, Collection[str] | None]
    """Keywords of `LLM` → the fields of a nested model; None if it has none or they are unknown."""
    engine_options: Mapping[str, Collection[str] | None] | None
    """The same for compiled engines; None if there is no such backend."""
    has_priorities: bool
    """True if requests have a priority, which orders the engine's own queue (≥ 1.3)."""
    has_prompt_logprobs: bool
    """True if prompt log-probabilities include the prompt's tokens; 1.2 returns only the most probable tokens."""
    lora_request: type[Any]
    scheduling_params: type[Any]
    decoding_configs: Mapping[str, type[Any]]
    """The classes of speculative_config that the package exports, by the name before `DecodingConfig`."""

    @property
    def has_sampler_choice(self) -> bool:
        """True in 1.2: `sampler_type` selects one of two samplers; the default ignores penalties, filters and seeds (PR #18232)."""
        return "sampler_type" in self.options

    @property
    def calls_workers(self) -> bool:
        """True if the engine is asked for figures by a remote call (≥ 1.3), which blocks; before, it sends them unasked."""
        return hasattr(self.llm, "get_kv_cache_capacity")

    def splits_prompts(self, *, mla: bool) -> bool:
        """Return False if the engine ignores enable_chunked_prefill: for MLA on some GPUs (py_executor_creator.py near 1.2.1)."""
        if not mla:
            return True
        cuda = import_module("torch").cuda
        return not cuda.is_available() or cuda.get_device_capability() in MLA_CHUNKS


def is_healthy(llm: LLM) -> bool:
    """Return True unless the engine itself has noticed a failure."""
    check = getattr(llm, "_check_health", None)
    if check is not None:
        return bool(check())
    executor = getattr(llm, "_executor", None)
    return executor is not None and not executor.is_shutdown()


def explain(error: BaseException) -> str:
    """Return the message of an error in one line; of a failed validation every field and its problem."""
    if (problems := getattr(error, "errors", None)) is not None:
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in problems())
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def installed_version() -> str | None:
    """Return the version of tensorrt_llm without importing it; None if it is not installed or has no metadata."""
    try:
        return version("tensorrt_llm")
    except PackageNotFoundError:
        return None


def load_library() -> Library:
    """Import TensorRT-LLM, which takes many seconds. Raises EngineError."""
    if find_spec("tensorrt_llm") is None:
        raise EngineError("the tensorrt-llm engine needs TensorRT-LLM: see docs/tensorrt-llm.md for how to install it")
    try:
        package = import_module("tensorrt_llm")
        llmapi = import_module("tensorrt_llm.llmapi")
        utils = import_module("tensorrt_llm.executor.utils")
        compiled = find_spec("tensorrt_llm._tensorrt_engine") is not None
        engine_llm = import_module("tensorrt_llm._tensorrt_engine").LLM if compiled else None
        return Library(
            version=str(getattr(package, "__version__", installed_version() or "")),
            llm=package.LLM,
            engine_llm=engine_llm,
            sampling_params=package.SamplingParams,
            guided_decoding_params=llmapi.GuidedDecodingParams,
            request_error=cast("type[Exception]", utils.RequestError),
            options=_options(llmapi, llmapi.TorchLlmArgs),
            engine_options=_options(llmapi, llmapi.TrtLlmArgs) if compiled else None,
            lora_request=llmapi.LoRARequest,
            scheduling_params=import_module("tensorrt_llm.scheduling_params").SchedulingParams,
            has_priorities="priority" in signature(package.LLM.generate_async).parameters,
            has_prompt_logprobs="prompt_logprobs_simple_format" in signature(package.SamplingParams).parameters,
            decoding_configs={
                kind: cls for kind in DECODING_CONFIGS if (cls := getattr(llmapi, f"{kind}DecodingConfig", None))
            },
        )
    except (ImportError, AttributeError, OSError) as error:
        # OSError: a shared library is missing.
        raise EngineError(f"TensorRT-LLM is installed but cannot be imported: {typed_line(error)}") from error


def _options(llmapi: ModuleType, arguments: type[Any]) -> dict[str, Collection[str] | None]:
    """Return the fields of `arguments`, a pydantic model, each with the fields of its nested model if it is known."""
    options: dict[str, Collection[str] | None] = dict.fromkeys(arguments.model_fields)
    for name, model in NESTED_OPTIONS.items():
        if name in options and (known := getattr(llmapi, model, None)) is not None:
            options[name] = frozenset(known.model_fields)
    return options
