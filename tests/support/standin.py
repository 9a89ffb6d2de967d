"""Make the stand-in for TensorRT-LLM importable, in this process or in others."""

from __future__ import annotations

import importlib
import json
import os
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "fakes" / "tensorrt_llm"
REAL = os.environ.get("TRTLLM_REAL_RELEASE", "")
"""The release whose real code is tested over the stand-in's engine: see trtllm_real. Empty: the stand-in alone."""
VERSIONS = (REAL,) if REAL else ("1.2", "1.3")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}

_IMPORTED: dict[str, dict[str, ModuleType]] = {}
"""Release → its modules, once they were imported: they take a quarter of a second."""


def python_path(version: str) -> str:
    """Return the PYTHONPATH of a release: the stand-in, and the metadata that name its version."""
    folders = ((FAKES / "real",) if REAL else ()) + (FAKES, FAKES / "releases" / version)
    return os.pathsep.join(map(str, folders))


def build_wheel(version: str, folder: Path) -> Path:
    """Write the wheel of a release to `folder`: it requires what the real one pins."""
    [info] = (FAKES / "releases" / version).iterdir()
    wheel = folder / f"{info.stem}-py3-none-any.whl"
    files = [
        file for name in ("tensorrt_llm", "trtllm_standin") for file in (FAKES / name).rglob("*.*") if file.is_file()
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in files:
            if file.suffix != ".pyc":
                archive.write(file, file.relative_to(FAKES))
        archive.write(info / "METADATA", f"{info.name}/METADATA")
        archive.writestr(
            f"{info.name}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info.name}/RECORD", "")
    return wheel


def table(version: str) -> dict[str, Any]:
    """Return the recorded signatures of a release."""
    found: dict[str, Any] = json.loads((FAKES / "trtllm_standin" / f"signatures-{version}.json").read_text())
    return found


def model_folder(folder: Path, **changes: object) -> Path:
    """Write a Hugging Face folder without weights, which the stand-in does not need."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@dataclass(frozen=True, slots=True)
class Log:
    """The events that the stand-in reported so far: see trtllm_standin.inspection."""

    events: tuple[dict[str, Any], ...]

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the events of a kind, in order."""
        return [entry for entry in self.events if entry["event"] == event]

    @property
    def ends(self) -> Counter[str]:
        """Reason → number of requests that ended so."""
        return Counter(entry["reason"] for entry in self.of("end"))

    @property
    def unfinished(self) -> set[int]:
        """Ids of requests without an end."""
        return {entry["id"] for entry in self.of("request")} - {entry["id"] for entry in self.of("end")}


def read_log(path: Path) -> Log:
    """Read the complete lines of the file that TRTLLM_STANDIN_LOG names; it may still grow."""
    text = path.read_text() if path.exists() else ""
    return Log(tuple(json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")))


@contextmanager
def importable(version: str, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Iterator[None]:
    """Make one release importable in this process; `settings` are the stand-in's, in lower case without prefix."""
    for name, value in settings.items():
        monkeypatch.setenv(f"TRTLLM_STANDIN_{name.upper()}", str(value))
    for folder in reversed(python_path(version).split(os.pathsep)):
        monkeypatch.syspath_prepend(folder)
    _forget()
    sys.modules.update(_IMPORTED.get(version, {}))
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    """Take the modules out of sys.modules; they are kept for the next test with their release."""
    names = [
        name for name in sys.modules if name.partition(".")[0] in ("tensorrt_llm", "trtllm_standin", "trtllm_real")
    ]
    modules = {name: sys.modules.pop(name) for name in names}
    for function in vars(modules.get("tensorrt_llm.llmapi.utils", ModuleType(""))).values():
        if hasattr(function, "cache_clear"):  # the real code remembers its environment
            function.cache_clear()
    if (package := modules.get("tensorrt_llm")) is not None:
        _IMPORTED[package.__version__[:3]] = modules
    importlib.invalidate_caches()
