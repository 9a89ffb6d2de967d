"""Broken model folders: each is refused in one line with advice, and TensorRT-LLM is not imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from model_folders import (
    CHECKPOINT,
    ENGINE,
    HUGGING_FACE,
    RANKS,
    compiled_engine,
    engine,
    fill,
    mapping,
    nothing_imported,
)

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.engine_folder import check_engine


@pytest.fixture(autouse=True)
def _nothing_is_imported(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_imported(tmp_path_factory.mktemp("poison"), monkeypatch):
        yield


@dataclass(frozen=True)
class Broken:
    """A folder, the circumstances, and words of the error."""

    words: tuple[str, ...]
    config: object = None
    files: Mapping[str, bytes] = field(default_factory=lambda: RANKS)
    world_size: int = 2
    installed: str | None = "1.2.1"


AGAIN = "build the engines again with trtllm-build"
DOWNLOAD = "copy or download the folder again"
BROKEN = {
    # config.json is not a JSON object.
    "empty config": Broken(("config.json is empty", DOWNLOAD), b""),
    "config cut off": Broken(("is no JSON", DOWNLOAD), json.dumps(ENGINE).encode()[:300]),
    "config not UTF-8": Broken(("is no JSON", "utf-8", DOWNLOAD), b'{"version": "\xff"}'),
    "config too deep": Broken(("is no JSON", DOWNLOAD), b"[" * 100_000),
    "a list": Broken(("does not hold a JSON object", DOWNLOAD), []),
    # Not a model, or incomplete.
    "no config": Broken(("has no config.json", "name the folder of a model"), None, {}),
    "engines without config": Broken(("has engines but no config.json", "copy the whole folder"), None),
    "an object of something else": Broken(
        ("architectures", "build_config", "name the folder"), {"architecture": "vit"}
    ),
    "Hugging Face without architectures": Broken(
        ("architectures is missing", "such as LlamaForCausalLM"), {"model_type": "llama", "architectures": None}
    ),
    "architectures no list": Broken(("architectures must be a list",), HUGGING_FACE | {"architectures": "Llama"}),
    # Not built yet, or too old.
    "checkpoint": Broken(
        ("not built yet", "run trtllm-build --checkpoint_dir {} --output_dir {}-engine", "tensorrt-llm <= 1.2"),
        CHECKPOINT,
    ),
    # Versions.
    "no version": Broken(("version is missing", AGAIN), engine(version=...)),
    "version a number": Broken(("version is 1.2, not a name", AGAIN), engine(version=1.2)),
    "version not one": Broken(("version is 'none'", AGAIN), engine(version="none")),
    "older engine": Broken(
        ("built by TensorRT-LLM 1.1.0", "1.2.1 is installed", f"{AGAIN} of 1.2.1", "install tensorrt-llm 1.1.0"),
        engine(version="1.1.0"),
    ),
    "newer engine": Broken(("built by TensorRT-LLM 1.2.1", "1.1.0 is installed", AGAIN), ENGINE, installed="1.1.0"),
    "no backend for engines": Broken(
        (
            "TensorRT-LLM 1.3.0rc14",
            "install tensorrt-llm <= 1.2",
            "they are of 1.2.1",
            "Hugging Face checkpoint itself",
        ),
        ENGINE,
        installed="1.3.0rc14",
    ),
    # GPUs and ranks.
    "for more GPUs": Broken(
        ("built for 2 GPUs", "has 1", "--num-shard 2", "build the engines again for 1"), ENGINE, world_size=1
    ),
    "for one GPU": Broken(("built for 1 GPU,", "--num-shard 1"), mapping(world_size=1, tp_size=1)),
    "no tp_size": Broken(("pretrained_config.mapping.tp_size is missing", AGAIN), mapping(world_size=2)),
    "a rank is missing": Broken(("rank1.engine is missing", "2 GPUs", AGAIN), ENGINE, {"rank0.engine": b"plan"}),
    "a rank is empty": Broken(("rank1.engine is empty", AGAIN), ENGINE, RANKS | {"rank1.engine": b""}),
    # Objects and names.
    "no pretrained_config": Broken(("pretrained_config is missing", AGAIN), engine(pretrained_config=...)),
    "no build_config": Broken(("build_config is missing", AGAIN, "1.2.1"), engine(build_config=...)),
    "build_config a list": Broken(("build_config is [], not an object", AGAIN), engine(build_config=[])),
    "quant_algo a number": Broken(
        ("quantization.quant_algo is 8, not a name", AGAIN), engine(pretrained_config__quantization__quant_algo=8)
    ),
    "dtype of weights only": Broken(("dtype is 'int8'", "bfloat16", AGAIN), engine(pretrained_config__dtype="int8")),
    # Limits.
    "no max_seq_len": Broken(("build_config.max_seq_len is missing", AGAIN), engine(build_config__max_seq_len=...)),
    "max_seq_len a string": Broken(
        ("max_seq_len is '4096', not a whole", AGAIN), engine(build_config__max_seq_len="4096")
    ),
    "max_batch_size zero": Broken(("max_batch_size is 0, not", AGAIN), engine(build_config__max_batch_size=0)),
    "max_batch_size true": Broken(("max_batch_size is True, not", AGAIN), engine(build_config__max_batch_size=True)),
    "max_num_tokens huge": Broken(("max_num_tokens is 4294967296", AGAIN), engine(build_config__max_num_tokens=2**32)),
    "beams": Broken(("beams of 4", f"{AGAIN} --max_beam_width 1"), engine(build_config__max_beam_width=4)),
    # KV cache and padding.
    "continuous KV cache": Broken(
        ("CONTINUOUS, not paged", f"{AGAIN} --kv_cache_type paged"),
        engine(build_config__kv_cache_type="continuous", build_config__plugin_config__paged_kv_cache=False),
    ),
    "KV cache of another kind": Broken(("kv_cache_type is 'RING'", AGAIN), engine(build_config__kv_cache_type="ring")),
    "padded input": Broken(
        ("padded", f"{AGAIN} --remove_input_padding enable"),
        engine(build_config__plugin_config__remove_input_padding=False),
    ),
    "padding not settled": Broken(
        ("remove_input_padding is 1, not true or false", AGAIN),
        engine(build_config__plugin_config__remove_input_padding=1),
    ),
    # generation_config.json and EOS tokens.
    "generation_config broken": Broken(
        ("generation_config.json is no JSON", DOWNLOAD), ENGINE, RANKS | {"generation_config.json": b"{"}
    ),
    "eos no id": Broken(
        ("generation_config.json: eos_token_id is '</s>'",),
        ENGINE,
        RANKS | {"generation_config.json": b'{"eos_token_id": "</s>"}'},
    ),
    "eos below zero": Broken(("eos_token_id is [-1]", AGAIN), engine(pretrained_config__eos_token_id=[-1])),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=list(BROKEN))
def test_broken_folders_are_refused_in_one_line(tmp_path: Path, broken: Broken) -> None:
    folder = fill(tmp_path / "model", broken.config, broken.files)
    with pytest.raises(EngineError) as refusal:
        built = compiled_engine(folder)
        check_engine(folder, built, world_size=broken.world_size, installed=broken.installed)
    line = str(refusal.value)
    for words in broken.words:
        assert words.replace("{}", str(folder)) in line
    assert str(folder) in line
    assert "\n" not in line


def test_torch_is_not_imported_either(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from text_generation_shard.engines.tensorrt_llm.folder import inspect_folder
inspect_folder(Path({str(fill(tmp_path, ENGINE, RANKS))!r}))
print(*{{"tensorrt_llm", "torch", "tensorrt"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
