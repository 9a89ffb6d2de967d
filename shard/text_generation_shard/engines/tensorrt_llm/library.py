"""The installed TensorRT-LLM: found, imported, and asked what it can do.

Versions are told apart by what they have, not by their numbers. Imports happen here and nowhere else, and only in the shard
that runs this engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.api import LLM

NESTED = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cuda_graph_config": "CudaGraphConfig",
}
"""Options that are models of their own, by the name of their class."""


@dataclass(frozen=True, slots=True)
class Library:
    """See the module."""

    version: str
    llm: type[Any]
    """LLM of the PyTorch backend."""
    engine_llm: type[Any] | None
    """LLM of the backend for compiled engines; None where it was removed (≥ 1.3)."""
    sampling_params: type[Any]
    guided_decoding_params: type[Any]
    request_error: type[Exception]
    options: Mapping[str, Collection[str] | None]
    """Keywords of `LLM`; those of a nested model with its fields, if they are known."""
    engine_options: Mapping[str, Collection[str] | None] | None
    """The same of the one for compiled engines; None where there is none."""
    sampling_fields: frozenset[str]

    @property
    def has_sampler_choice(self) -> bool:
        """Whether `sampler_type` chooses between two samplers, of which the default one ignores penalties, min_p and seeds.

        1.2: it does (issue #9442, PRs #16485, #16590, #17172). Removed with the second sampler by PR #18232, when the
        first one had learned them all.
        """
        return "sampler_type" in self.options

    @property
    def scores_prompts(self) -> bool:
        """Whether prompt log-probabilities tell of the prompt's own token: those of 1.2 hold the most probable alone."""
        return "prompt_logprobs_simple_format" in self.sampling_fields

    def kv_capacity(self, llm: LLM) -> tuple[int, int] | None:
        """(blocks, tokens a block) of the pool, where the engine says so without having run (≥ 1.3)."""
        ask = getattr(llm, "get_kv_cache_capacity", None)
        told = ask() if ask is not None else None
        if not told:
            return None
        blocks, size = told.get("maxNumBlocks", 0), told.get("tokensPerBlock", 0)
        return (int(blocks), int(size)) if blocks and size else None

    def is_healthy(self, llm: LLM) -> bool:
        """Whether the engine has not noticed that it is broken."""
        check = getattr(llm, "_check_health", None)
        if check is not None:
            return bool(check())
        executor = getattr(llm, "_executor", None)
        return executor is not None and not executor.is_shutdown()


def installed_version() -> str | None:
    """Of tensorrt_llm, without importing it; None where it is not installed, or does not say."""
    try:
        return version("tensorrt_llm")
    except PackageNotFoundError:
        return None


def load_library() -> Library:
    """Import TensorRT-LLM, which takes a while. Raises EngineError."""
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
            sampling_fields=frozenset(field.name for field in dataclasses.fields(package.SamplingParams)),
        )
    except (ImportError, AttributeError, OSError) as error:
        # OSError: a shared library that is not there.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise EngineError(f"TensorRT-LLM is installed but cannot be imported: {reason}") from error


def _options(llmapi: ModuleType, arguments: type[Any]) -> dict[str, Collection[str] | None]:
    """Keywords that `arguments`, a pydantic model, is made of; those of a nested model with its fields, if they are known."""
    options: dict[str, Collection[str] | None] = dict.fromkeys(arguments.model_fields)
    for name, model in NESTED.items():
        if name in options and (known := getattr(llmapi, model, None)) is not None:
            options[name] = frozenset(known.model_fields)
    return options
