"""The table of the modules that are replaced, each with the names it then has; it is hollow for all others.

_utils, logger         the real ones import MPI and the C++ library
bindings               C++
inputs                 imports readers of images and sound; prompts of token ids need two of its functions
llmapi.mpi_session     starts processes by MPI
llmapi.llm_utils       downloads and converts models
llmapi.tracer          is off
_torch                 the engine
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

GPUS = 64


class Singleton(type):
    """A class with one instance."""

    @functools.cache  # noqa: B019 - one for each class
    def __call__(cls, *arguments: object, **keywords: object) -> Any:  # noqa: ANN401 - an instance
        return super().__call__(*arguments, **keywords)


class Logger(logging.LoggerAdapter[logging.Logger]):
    """The library's logger: writes to Python's."""

    level = "error"

    def set_level(self, level: str) -> None:
        """Set the level."""
        self.level = level

    def set_rank(self, rank: int) -> None:
        """Ranks are not told apart."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a method such as warning_once
        if name.endswith("_once"):
            return lambda message, *_, **__: self.debug(message)
        raise AttributeError(name)


class Comm:
    """The communicator of one rank."""

    def barrier(self) -> None:
        """Return at once."""

    def allgather(self, value: object) -> list[object]:
        """Return the values of all ranks."""
        return [value]


class Range(contextlib.ContextDecorator):
    """A range of a profile."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@contextlib.contextmanager
def _unchanged(*_: object) -> Iterator[None]:
    yield


def _utils() -> dict[str, Any]:
    zero, one = (lambda: 0), (lambda: 1)
    return {
        **dict.fromkeys(("mpi_rank", "global_mpi_rank", "local_mpi_rank"), zero),
        **dict.fromkeys(("mpi_world_size", "global_mpi_size", "local_mpi_size"), one),
        **dict.fromkeys(("mpi_disabled", "is_trace_enabled"), lambda *_: False),
        **dict.fromkeys(("nvtx_range", "nvtx_range_debug"), Range),
        "mpi_comm": Comm,
        "nvtx_mark": lambda *_, **__: None,
        "customized_gc_thresholds": _unchanged,
        "KVCacheEventSerializer": SimpleNamespace(serialize=lambda _: []),
    }


def _inputs() -> dict[str, Any]:
    return {
        "prompt_inputs": lambda given: given if isinstance(given, dict) else {"prompt_token_ids": given},
        "get_cache_salt_id": lambda salt: int.from_bytes(hashlib.sha256(salt.encode()).digest()[:7]),
        "create_input_processor": lambda _, tokenizer, *__, **___: SimpleNamespace(tokenizer=tokenizer),
    }


def _bindings() -> dict[str, Any]:
    from trtllm_real import bindings

    return {"executor": bindings, "steady_clock_now": lambda: None}


def _executor_bindings() -> dict[str, Any]:
    from trtllm_real import bindings

    return {name: value for name, value in vars(bindings).items() if not name.startswith("_")}


def _sessions() -> dict[str, Any]:
    from trtllm_real.processes import MpiPoolSession, MpiSession

    return {
        "MpiSession": MpiSession,
        "MpiPoolSession": MpiPoolSession,
        "external_mpi_comm_available": lambda _: False,
        "need_spawn_mpi_workers": lambda size: size > 1,
        "set_mpi_session_cpp": lambda _: None,
    }


def _llm_utils() -> dict[str, Any]:
    class CachedModelLoader:
        def __init__(self, args: Any, **_: object) -> None:  # noqa: ANN401 - TorchLlmArgs
            self._model = args.model

        def __call__(self) -> tuple[None, object]:
            return None, self._model

    class LlmBuildStats: ...

    class ModelLoader:
        load_hf_tokenizer = staticmethod(lambda *_, **__: None)
        load_hf_generation_config = staticmethod(lambda *_, **__: None)
        load_hf_model_config = staticmethod(lambda *_, **__: None)

    return {name: value for name, value in locals().items() if isinstance(value, type)}


def _creator() -> dict[str, Any]:
    from trtllm_real.py_executor import PyExecutor

    return {"create_py_executor": lambda llm_args, **_: PyExecutor(llm_args), "PyExecutor": PyExecutor}


MODULES: dict[str, Callable[[], dict[str, Any]]] = {
    "_utils": _utils,
    "logger": lambda: {
        "logger": Logger(logging.getLogger("tensorrt_llm")),
        "Singleton": Singleton,
        "set_level": lambda _: None,
    },
    "bindings": _bindings,
    "bindings.executor": _executor_bindings,
    "inputs": _inputs,
    "llmapi.mpi_session": _sessions,
    "llmapi.llm_utils": _llm_utils,
    "llmapi.tracer": dict,
    "_torch.models.modeling_auto": lambda: {"MODEL_CLASS_MAPPING": {}},
    "_torch.pyexecutor.py_executor": _creator,
    "_torch.pyexecutor.py_executor_creator": _creator,
}


def pretend_gpus() -> None:
    """Let PyTorch say that there are GPUs, which validators of arguments and the worker ask for."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: GPUS
    cuda.current_device = lambda: 0
    cuda.set_device = lambda _: None
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, total_memory=80 << 30, name="pretended")
    cuda.Stream = Range
