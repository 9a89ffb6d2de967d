"""TensorRT-LLM engines over the stand-in, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from standin import importable

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.tensorrt_llm.build import build
from text_generation_shard.engines.tensorrt_llm.construct import Construction, construct
from text_generation_shard.engines.tensorrt_llm.engine import TensorRTEngine
from text_generation_shard.engines.tensorrt_llm.folder import read_hugging_face_model
from text_generation_shard.engines.tensorrt_llm.library import Library
from text_generation_shard.json_object import JsonObject


class Engines:
    """Builds and warms up engines of one release; `settings` are those of the stand-in."""

    def __init__(self, version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._version = version
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._stack = ExitStack()

    def __call__(
        self,
        *,
        options: str = "",
        hang_timeout: float = 60.0,
        max_batch_size: int = 0,
        num_shard: int = 1,
        folder: Path | None = None,
        lora_adapters: str = "",
        lora_modules_dir: str = "",
        **settings: object,
    ) -> TensorRTEngine:
        self._stack.enter_context(importable(self._version, self._monkeypatch, **{"stats_ms": 20} | settings))
        config = ShardConfig(
            engine="tensorrt-llm",
            model_path=str(folder or self._folder),
            tensor_parallel=num_shard,
            trtllm_options=options,
            hang_timeout=hang_timeout,
            max_batch_size=max_batch_size,
            lora_adapters=lora_adapters,
            lora_modules_dir=lora_modules_dir,
        )
        engine = build(config)
        self._stack.callback(_close, engine)
        engine.warm_up(WarmUpLimits())
        return engine

    def close(self) -> None:
        """Close all engines."""
        self._stack.close()


def _close(engine: TensorRTEngine) -> None:
    """Close an engine; give up after a while, because the library waits forever for a lost engine."""
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(20)


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread or process does."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def constructed(
    library: Library, folder: Path, options: Mapping[str, object] | None = None, **settings: object
) -> Construction:
    """Return the construction of an engine for a Hugging Face folder."""
    config = ShardConfig(engine="tensorrt-llm", model_path=str(folder), **settings)  # type: ignore[arg-type]
    return construct(config, library, read_hugging_face_model(JsonObject.read(folder)), options or {})
