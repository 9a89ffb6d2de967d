"""Answers imports below `tensorrt_llm`: replaced modules, those of the sources, and hollow ones for everything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = "TRTLLM_REAL_SOURCE"
"""The variable that names the folder of the sources, which has the folder `tensorrt_llm`."""
ROOT = "tensorrt_llm"
REPLACED = (
    "_torch",
    "bindings",
    "builder",
    "functional",
    "inputs",
    "models",
    "plugin",
    "quantization",
    "runtime",
    "tools",
)
"""Packages that import the C++ library or the models: hollow, except for the modules of the seam."""
FOREIGN = ("colored", "cuda", "etcd3", "mpi4py", "nvtx", "ray")
"""Packages of others that the sources import, hollow where they are not installed."""
NEVER_HOLLOW = ("_tensorrt_engine", "_torch.peft.lora.cuda_graph_lora_manager")
"""Modules whose absence says something to a caller."""
EXPORTED = ("llmapi.llm", "llmapi.llm_args", "sampling_params", "executor.request", "executor.result")
"""Modules whose names the packages `tensorrt_llm` and `tensorrt_llm.llmapi` have too."""


class _HollowType(type):
    """A class with every attribute: each is a hollow class of its own, the same one each time."""

    def __getattr__(cls, name: str) -> Any:  # noqa: ANN401 - a class
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, hollow(name, cls.__module__))
        return vars(cls)[name]


class Hollow(metaclass=_HollowType):
    """An object that takes all arguments, is false, and returns what it is called with."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __call__(self, *arguments: object, **_: object) -> object:
        return arguments[0] if arguments else None

    def __getattr__(self, name: str) -> Hollow:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow()

    def __bool__(self) -> bool:
        return False


def hollow(name: str, module: str) -> type[Hollow]:
    """Return a new hollow class."""
    return _HollowType(name, (Hollow,), {"__module__": module})


class _Loader(Loader):
    """Fills a module with the names that the seam has for it; `missing` returns any other one."""

    def __init__(self, names: dict[str, Any], missing: Callable[[str, str], Any] | None = None) -> None:
        self._names, self._missing = names, missing

    def exec_module(self, module: ModuleType) -> None:
        """Set the names."""
        vars(module).update(self._names)
        if (missing := self._missing) is not None:
            vars(module)["__getattr__"] = lambda name: missing(module.__name__, name)


class Finder(MetaPathFinder):
    """Stands first in sys.meta_path."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module; None leaves it to the others."""
        del target
        if name.partition(".")[0] in FOREIGN and PathFinder.find_spec(name, path) is None:
            return self._hollow(name, {})
        inner = name.removeprefix(f"{ROOT}.")
        if inner == name:
            return None
        from trtllm_real.seam import MODULES  # the seam imports modules of the sources

        if inner in MODULES:
            return self._hollow(name, MODULES[inner]())
        if inner == "llmapi":
            spec = spec_from_loader(name, _Loader({}, look_up), is_package=True)
            assert spec is not None
            spec.submodule_search_locations = [str(self._source / ROOT / "llmapi")]
            return spec
        if inner in ("llmapi.llm_args", "scheduling_params") and not self._exists(inner):
            from trtllm_real.recorded_args import names

            return spec_from_loader(name, _Loader(names()))
        is_replaced = inner.partition(".")[0] in REPLACED
        if inner in NEVER_HOLLOW and not (is_replaced and self._exists(inner)):
            return None
        return None if self._exists(inner) and not is_replaced else self._hollow(name, {})

    def _exists(self, inner: str) -> bool:
        base = self._source.joinpath(ROOT, *inner.split("."))
        return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()

    def _hollow(self, name: str, names: dict[str, Any]) -> ModuleSpec | None:
        return spec_from_loader(name, _Loader(names, _hollow_name), is_package=True)


def _hollow_name(module: str, name: str) -> type[Hollow]:
    if name.startswith("__"):
        raise AttributeError(name)
    vars(sys.modules[module])[name] = found = hollow(name, module)
    return found


def look_up(package: str, name: str) -> Any:  # noqa: ANN401 - anything that the sources export
    """Return an exported name of `package`. Raises AttributeError."""
    if not name.startswith("__"):
        for module in EXPORTED:
            if hasattr(found := import_module(f"{ROOT}.{module}"), name):
                return getattr(found, name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def install(path: Iterable[str]) -> list[str]:
    """Put the finder in place, pretend that there are GPUs; return the search path of the package."""
    from trtllm_real.seam import pretend_gpus

    source = Path(os.environ[SOURCE])
    sys.meta_path[:] = [Finder(source), *(finder for finder in sys.meta_path if not isinstance(finder, Finder))]
    pretend_gpus()
    return [*path, str(source / ROOT)]
