"""Imports both releases of the stand-in in one process, one after the other.

Elsewhere the folder v1_2 or v1_3 on PYTHONPATH is enough.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

FAKES = Path(__file__).resolve().parents[1]
VERSIONS = ("1.2", "1.3")
NAMES = ("tensorrt_llm", "trtllm_standin")
_loaded: dict[str, dict[str, ModuleType]] = {}


@dataclass
class Standin:
    """One release."""

    version: str
    package: Any
    made: list[Any] = field(default_factory=list)

    @property
    def request_error(self) -> type[RuntimeError]:
        """The class RequestError."""
        found: type[RuntimeError] = self.find("tensorrt_llm.executor.utils", "RequestError")
        return found

    def find(self, module: str, name: str) -> Any:  # noqa: ANN401 - of any type
        """Return a name of one of its modules."""
        return getattr(importlib.import_module(module), name)

    def llm(self, model: str | Path = "model", **kwargs: Any) -> Any:  # noqa: ANN401 - as LLM takes and gives them
        """Construct an LLM, by default without a tokenizer; it is shut down at the end."""
        llm = self.package.LLM(model, **{"skip_tokenizer_init": True} | kwargs)
        self.made.append(llm)
        return llm

    def params(self, **kwargs: Any) -> Any:  # noqa: ANN401 - as SamplingParams takes them
        """Construct SamplingParams for ids, without an end token."""
        return self.package.SamplingParams(**{"end_id": -1, "max_tokens": 8, "detokenize": False} | kwargs)

    def abandon(self, llm: Any) -> None:  # noqa: ANN401 - an LLM
        """Do not shut down an LLM that would hang; its threads end with the process."""
        llm._executor = None


async def tokens(result: Any) -> list[int]:  # noqa: ANN401 - a RequestOutput
    """The tokens of the first sequence at the end."""
    return list((await result).outputs[0].token_ids)


@contextmanager
def standing_in(version: str) -> Iterator[Standin]:
    """Make `import tensorrt_llm` find this release."""
    kept = _ours()
    path = sys.path[:]
    _forget()
    sys.path.insert(0, str(folder_of(version)))
    sys.modules.update(_loaded.get(version, {}))
    standin = Standin(version, importlib.import_module("tensorrt_llm"))
    try:
        yield standin
    finally:
        for llm in standin.made:
            llm.shutdown()
        _loaded[version] = _ours()
        _forget()
        sys.modules.update(kept)
        sys.path[:] = path


def folder_of(version: str) -> Path:
    """Return the folder for PYTHONPATH."""
    return FAKES / f"v{version.replace('.', '_')}"


def _ours() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] in NAMES}


def _forget() -> None:
    for name in _ours():
        del sys.modules[name]
