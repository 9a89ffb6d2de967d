"""llm_args.py and scheduling_params.py from the stand-in's tables, for sources that lack them."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, Self

from trtllm_standin.recorded import Recorded


class _Arguments:
    """The members that LLM and executor use beside the fields."""

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:  # noqa: ANN401 - fields
        return cls(**{"backend": "pytorch", **kwargs})

    @property
    def parallel_config(self) -> Any:  # noqa: ANN401 - _ParallelConfig
        given: Any = self
        size = given.tensor_parallel_size * given.pipeline_parallel_size * given.context_parallel_size
        mapping = SimpleNamespace(cp_size=given.context_parallel_size)
        return SimpleNamespace(
            world_size=size,
            world_size_per_node=size,
            is_multi_gpu=size > 1,
            cp_size=given.context_parallel_size,
            to_mapping=lambda: mapping,
        )

    mpi_session = None


def names() -> dict[str, Any]:
    """Return the names of the module."""
    recorded = Recorded(".".join(version("tensorrt_llm").split(".")[:2]))
    for name, entry in recorded.entries.items():
        if "fields" in entry and name not in recorded.classes:
            recorded.build(name, recorded.classes["BaseLlmArgs"] if name == "TrtLlmArgs" else None)
    found = {name: cls for name, cls in recorded.classes.items() if isinstance(cls, type)}
    for name in ("BaseLlmArgs", "TorchLlmArgs", "TrtLlmArgs"):
        if name in found:
            found[name] = type(name, (_Arguments, found[name]), {"__module__": "tensorrt_llm.llmapi.llm_args"})
    found["SchedulingParams"].__module__ = "tensorrt_llm.scheduling_params"  # sent to the worker
    return found | {"PybindMirror": SimpleNamespace(maybe_to_pybind=lambda value: value)}
