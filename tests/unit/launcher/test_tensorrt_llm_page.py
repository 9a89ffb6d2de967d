"""docs/tensorrt-llm.md matches the code: flags, options, explained messages."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest
from standin import table

from text_generation_launcher.config import LauncherConfig
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.build import read_model
from text_generation_shard.engines.tensorrt_llm.options import FLAG, RESERVED, check_options
from text_generation_shard.yaml_options import read_options

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")
SOURCES = "\n".join(
    path.read_text(encoding="utf-8") for folder in ("launcher", "shard") for path in (ROOT / folder).rglob("*.py")
)


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def known_options(version: str) -> dict[str, Collection[str] | None]:
    """Return the keywords of LLM recorded from its sources, with those of the nested models that the shard checks."""
    fields = {
        name: [field["name"] for field in entry["fields"]]
        for name, entry in table(version)["entries"].items()
        if "fields" in entry
    }
    options: dict[str, Collection[str] | None] = dict.fromkeys(fields["TorchLlmArgs"])
    return options | {
        "kv_cache_config": fields["KvCacheConfig"],
        "scheduler_config": fields["SchedulerConfig"],
        "cuda_graph_config": fields["CudaGraphConfig"],
    }


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_example_options_exist_in_both_versions(version: str) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) > 4
    for example in examples:
        check_options(read_options(example, FLAG), known_options(version))


def test_options_in_example_command_lines() -> None:
    options = [read_options(text, FLAG) for text in re.findall(r"--trtllm-options '([^']+)'", PAGE)]
    without = {"guided_decoding_backend": None}
    assert options == [without, {"kv_cache_config": {"dtype": "fp8"}}, {"sampler_type": "TRTLLMSampler"}, without]


def test_options_documented_as_not_settable() -> None:
    names = re.search(r"Not set here, .*?\n\n", PAGE, re.DOTALL)
    assert names is not None
    assert set(re.findall(r"`([a-z_]+)`", names[0])) <= RESERVED.keys()


def test_flags_of_the_table_exist() -> None:
    flags = re.findall(r"^\| `--([a-z-]+)", section("One GPU"), re.MULTILINE)
    assert len(flags) > 10
    assert {flag.replace("-", "_") for flag in flags} <= LauncherConfig.model_fields.keys()


def test_the_flag_documented_as_refused_is() -> None:
    assert "TGI's `--kv-cache-dtype` is refused here" in PAGE
    with pytest.raises(EngineError, match=r"--kv-cache-dtype fp8_e5m2: .* kv_cache_config"):
        read_model(ShardConfig(kv_cache_dtype="fp8_e5m2"))


@pytest.mark.parametrize(
    "message",
    [
        "the tensorrt-llm engine needs TensorRT-LLM",
        "TensorRT-LLM is installed but cannot be imported",
        "mpirun ended before the ranks were there",
        "the engine has brought nothing for",
        "of the engine died",
        "the step in progress did not end in time",
        "killed processes that a child left behind",
        "the engine's KV cache holds",
    ],
)
def test_explained_messages_exist_in_the_code(message: str) -> None:
    assert message in section("Troubleshooting")
    assert message in SOURCES
