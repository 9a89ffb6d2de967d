"""Builds the modules of the package `tensorrt_llm` of one release."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

from trtllm_standin.executor import GenerationExecutor
from trtllm_standin.llm import CompiledLLM, StandInLLM
from trtllm_standin.lora import LoRARequestMethods
from trtllm_standin.recorded import ENUMS, Recorded
from trtllm_standin.release import RELEASES
from trtllm_standin.results import (
    CompletionOutput,
    EngineDeadError,
    ErrorResponse,
    Logprob,
    RequestError,
    RequestOutput,
)
from trtllm_standin.sampling import GuideMethods, SamplingMethods

MODULES = {
    "tensorrt_llm": ("LLM", "SamplingParams", "__version__"),
    "tensorrt_llm.version": ("__version__",),
    "tensorrt_llm.executor": ("GenerationExecutor"),
    "tensorrt_llm.executor.result": ("CompletionOutput", "Logprob"),
    "tensorrt_llm.executor.utils": ("ErrorResponse", "RequestError"),
    "tensorrt_llm.llmapi": ("RequestError", "RequestOutput"),
    "tensorrt_llm.llmapi.llm": ("LLM", "RequestOutput"),
    "tensorrt_llm.llmapi.llm_args": ("TorchLlmArgs", "CapacitySchedulerPolicy", "ContextChunkingPolicy", "LoadFormat"),
    "tensorrt_llm.sampling_params": ("GuidedDecodingParams", "SamplingParams"),
}
"""Modules of both releases → their names, beside those that the tables list as public."""
MODULES_OF_1_3 = {
    "tensorrt_llm._torch": (),
    "tensorrt_llm._torch.peft": (),
    "tensorrt_llm._torch.peft.lora": (),
    "tensorrt_llm._torch.peft.lora.cuda_graph_lora_manager": ("CudaGraphLoraManager",),
    "tensorrt_llm.executor": ("EngineDeadError",),
    "tensorrt_llm.llmapi.llm_args": ("PrefillCudaGraphBackend", "WaitingQueuePolicy"),
    "tensorrt_llm.sampling_params": ("LogprobMode",),
}
BEHAVIOUR: dict[str, type] = {
    "SamplingParams": SamplingMethods,
    "GuidedDecodingParams": GuideMethods,
    "LoRARequest": LoRARequestMethods,
}
"""Recorded classes → the class that adds their behaviour."""
OWN = (
    CompletionOutput,
    EngineDeadError,
    ErrorResponse,
    GenerationExecutor,
    Logprob,
    RequestOutput,
)


def install(version: str) -> None:
    """Create the modules of this release; `tensorrt_llm` itself exists already."""
    recorded, release = Recorded(version), RELEASES[version]
    names: dict[str, Any] = {"__version__": release.version, "RequestError": RequestError}
    names |= {cls.__name__: cls for cls in OWN} | ENUMS
    for name, entry in recorded.entries.items():
        if "fields" in entry and name not in names and name not in recorded.classes:
            recorded.build(name, recorded.classes["BaseLlmArgs"] if name == "TrtLlmArgs" else BEHAVIOUR.get(name))
    names |= {name: cls for name, cls in recorded.classes.items() if isinstance(cls, type)}
    names["LlmArgs"] = names["TorchLlmArgs"]
    for cls in (names["SamplingParams"], names["GuidedDecodingParams"]):
        cls.__module__ = "tensorrt_llm.sampling_params"
    attributes = {"release": release, "args_class": names["TorchLlmArgs"], "sampling_class": names["SamplingParams"]}
    attributes["classes"] = recorded.classes
    methods = _methods(recorded)
    torch_llm = _subclass("_TorchLLM", StandInLLM, attributes | methods)
    names["LLM"] = _subclass("LLM", torch_llm, {})
    modules = {module: set(found) for module, found in MODULES.items()}
    for module, found in (MODULES_OF_1_3 if version == "1.3" else {}).items():
        modules.setdefault(module, set()).update(found)
    for module, public in recorded.entries["public imports"].items():
        modules.setdefault(module, set()).update(public["names"])
    for module in sorted(modules):
        _fill(module, {name: names.get(name) or _name_only(name, module) for name in modules[module]})
    if "tensorrt_llm._tensorrt_engine" in modules:
        compiled = {**attributes, **methods, "args_class": names["TrtLlmArgs"]}
        sys.modules["tensorrt_llm._tensorrt_engine"].LLM = _subclass("_TrtLLM", CompiledLLM, compiled)  # type: ignore[attr-defined]


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


def _name_only(name: str, module: str) -> type:
    """Return a class that can be imported, but not used."""

    def refuse(self: object, *_: object, **__: object) -> None:
        raise NotImplementedError(f"the stand-in knows {name} by its name only")

    return type(name, (), {"__module__": module, "__init__": refuse})


def _fill(name: str, names: dict[str, Any]) -> None:
    module = sys.modules.get(name)
    if module is None:
        module = sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
    for key, value in names.items():
        setattr(module, key, value)
