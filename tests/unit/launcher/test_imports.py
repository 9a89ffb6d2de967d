from __future__ import annotations

import subprocess
import sys

import pytest

MODEL_RUNTIMES = {"torch", "transformers", "tensorrt_llm"}
SLOW = {*MODEL_RUNTIMES, "grpc", "aiohttp", "huggingface_hub"}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("text_generation_launcher.__main__", {*SLOW, "pydantic"}),
        ("text_generation_launcher.commands", SLOW),
        ("text_generation_launcher.launch", MODEL_RUNTIMES | {"grpc_health.v1.health"}),
        ("text_generation_launcher.download", MODEL_RUNTIMES | {"grpc", "aiohttp"}),
        ("text_generation_shard.engines.torch.build.native", {"triton"}),  # torch for CPUs comes without it
    ],
)
def test_modules_do_not_import_slow_or_missing_packages(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert unwanted.isdisjoint(loaded.split())
