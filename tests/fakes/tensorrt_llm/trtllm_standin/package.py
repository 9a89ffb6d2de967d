"""Builds the modules of the package `tensorrt_llm` of one release."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

from trtllm_standin.llm import CompiledLLM, StandInLLM
from trtllm_standin.lora import LoRARequestMethods
from trtllm_standin.recorded import Recorded
from trtllm_standin.release import RELEASES
from trtllm_standin.results import RequestError
from trtllm_standin.sampling import GuideMethods, SamplingMethods

MODULES = {
    "1.2": {"tensorrt_llm.executor.utils": ("RequestError",)},
    "1.3": {
        "tensorrt_llm.executor.utils": ("RequestError",),
        "tensorrt_llm._torch.peft.lora.cuda_graph_lora_manager": (),
        "tensorrt_llm.scheduling_params": ("SchedulingParams",),
    },
}
"""Modules and names that are used, beside those that the tables list as public."""
BEHAVIOUR: dict[str, type] = {
    "SamplingParams": SamplingMethods,
    "GuidedDecodingParams": GuideMethods,
    "LoRARequest": LoRARequestMethods,
}
"""Recorded classes → the class that adds their behaviour."""


def install(version: str) -> None:
    """Create the modules of this release; `tensorrt_llm` itself exists already."""
    recorded, release = Recorded(version), RELEASES[version]
    classes = recorded.classes
    for name, entry in recorded.entries.items():
        if "fields" in entry and name not in classes:
            recorded.build(name, classes["BaseLlmArgs"] if name == "TrtLlmArgs" else BEHAVIOUR.get(name))
    attributes = {"release": release, "args_class": classes["TorchLlmArgs"], "classes": classes, **_methods(recorded)}
    names = {name: cls for name, cls in classes.items() if isinstance(cls, type)} | {"RequestError": RequestError}
    names["LLM"] = _subclass("LLM", _subclass("_TorchLLM", StandInLLM, attributes), {})
    public = {module: entry["names"] for module, entry in recorded.entries["public imports"].items()}
    for module, exported in (public | MODULES[version]).items():
        _fill(module, {name: names[name] for name in exported if name in names})
    _fill("tensorrt_llm", {"__version__": release.version})
    if "tensorrt_llm._tensorrt_engine" in public:
        compiled = _subclass("_TrtLLM", CompiledLLM, attributes | {"args_class": classes["TrtLlmArgs"]})
        _fill("tensorrt_llm._tensorrt_engine", {"LLM": compiled})


def _methods(recorded: Recorded) -> dict[str, Callable[..., Any]]:
    """Return the methods of LLM that differ between releases, with their recorded signatures."""
    found = {}
    for entry in recorded.entries:
        owner, _, name = entry.partition(".")
        if owner == "LLM" and "parameters" in recorded.entries[entry]:
            body = StandInLLM.RECORDED_METHODS.get(name)
            if body is not None or not hasattr(StandInLLM, name):
                found[name] = _method(name, recorded.signature(entry), body)
    return found


def _method(name: str, signature: inspect.Signature, body: Callable[..., Any] | None) -> Callable[..., Any]:
    def method(self: StandInLLM, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as recorded
        bound = signature.bind(*args, **kwargs)
        if body is None:
            raise NotImplementedError(f"the stand-in does not imitate LLM.{name}")
        bound.apply_defaults()
        return body(self, **bound.arguments)

    method.__name__ = name
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def _subclass(name: str, base: type, attributes: dict[str, Any]) -> type:
    return type(name, (base,), {"__module__": "tensorrt_llm.llmapi.llm", **attributes})


def _fill(name: str, names: dict[str, Any]) -> None:
    """Set names in a module; it and its parents are created if they do not exist."""
    if name not in sys.modules:
        parent, _, child = name.rpartition(".")
        _fill(parent, {})
        sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
        setattr(sys.modules[parent], child, sys.modules[name])
    vars(sys.modules[name]).update(names)
