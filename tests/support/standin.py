"""Make the stand-in for TensorRT-LLM importable, in this process or in others."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "fakes" / "tensorrt_llm"
VERSIONS = ("1.2", "1.3")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def path_of(version: str) -> Path:
    """Return the folder to import `tensorrt_llm` from."""
    return FAKES / f"v{version.replace('.', '_')}"


def model_folder(folder: Path, **changes: object) -> Path:
    """Write a Hugging Face folder without weights, which the stand-in does not need."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def read_log(path: Path) -> Any:  # noqa: ANN401 - its class is not importable here
    """Read the file that TRTLLM_STANDIN_LOG names, as trtllm_standin.inspection.Log."""
    spec = importlib.util.spec_from_file_location("standin_inspection", FAKES / "common/trtllm_standin/inspection.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module.Log.read(path)


@contextmanager
def importable(version: str, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Iterator[None]:
    """Make one release importable in this process; `settings` are the stand-in's, in lower case without prefix."""
    for name, value in settings.items():
        monkeypatch.setenv(f"TRTLLM_STANDIN_{name.upper()}", str(value))
    monkeypatch.syspath_prepend(str(path_of(version)))
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tensorrt_llm", "trtllm_standin"):
            del sys.modules[name]
    common = str(FAKES / "common")
    while common in sys.path:
        sys.path.remove(common)
    importlib.invalidate_caches()
