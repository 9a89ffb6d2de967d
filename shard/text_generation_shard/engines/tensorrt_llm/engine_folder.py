"""Read the configuration of compiled engines, and check that they can run here.

`trtllm-build` (TensorRT-LLM ≤ 1.2) writes config.json and a rank{N}.engine for each GPU. TensorRT-LLM reads config.json twice:
in `EngineConfig.from_json_str` (tensorrt_llm/builder.py), and in `parseJson` (cpp/tensorrt_llm/runtime/gptJsonConfig.cpp), which
runs in the worker process, reports little, and reads a missing limit as zero. So every value is checked here by the stricter of
the two, before anything is loaded.
"""

import re
import struct
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from reprlib import repr as shortened
from typing import ClassVar

from text_generation_common.model_files import ModelFileError, find_file
from text_generation_shard.engine import EngineError
from text_generation_shard.json_object import JsonObject, eos_token_ids

DTYPES = ("float16", "bfloat16", "float32")
"""Values of pretrained_config.dtype that `parseJson` accepts."""
LAST_WITH_ENGINES = (1, 2)
"""Last release that runs compiled engines (docs/source/legacy/tensorrt-backend-removal.md of NVIDIA/TensorRT-LLM)."""
REBUILD = "build the engines again with trtllm-build"

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?!\d)[-+.!\w]{0,64}", re.ASCII)
_PLAN_HEADER = struct.Struct("<4sI16x4B")
"""The start of an engine file (a plan), as `trtexec --getPlanVersionOnly` reads it (samples/common/sampleEngines.cpp in
NVIDIA/TensorRT): tag, version of the layout, version of TensorRT. The GPU that it was built for has no known place in it."""


@dataclass(frozen=True, slots=True)
class CompiledEngine:
    """The configuration that engines were built with. Names as in config.json; lengths and budgets in tokens."""

    version: str
    """The TensorRT-LLM version that built them."""
    dtype: str
    vocab_size: int
    world_size: int
    tp_size: int
    pp_size: int
    cp_size: int
    max_sequence_length: int
    """Limit of prompt and new tokens together."""
    max_batch_size: int
    max_num_tokens: int
    """Limit of one iteration, over all sequences."""
    tokens_per_block: int
    paged_context_fmha: bool
    """Chunked prefill and the reuse of computed blocks are possible."""
    gather_generation_logits: bool
    """Log-probabilities of new tokens are available."""
    eos_token_ids: tuple[int, ...]
    """From generation_config.json beside the engines, else from config.json; empty if neither has one."""
    model_type: ClassVar = ""
    """The build does not tell it."""


def read_engine(config: JsonObject) -> CompiledEngine:
    """Read the configuration from `config`, the config.json of a folder of compiled engines. Raises EngineError."""
    version = config.advising(REBUILD).text("version")
    if release(version) is None:
        raise config.advising(REBUILD).error(f"version is {shortened(version)}, not a version of TensorRT-LLM")
    config = config.advising(f"{REBUILD} (these are of TensorRT-LLM {version})")
    pretrained, build = config.inner("pretrained_config"), config.inner("build_config")
    mapping, quantization = pretrained.inner("mapping"), pretrained.inner("quantization")
    plugins = build.inner("plugin_config")
    pretrained.text("architecture")
    for name in ("quant_algo", "kv_cache_quant_algo"):
        quantization.optional_text(name)
    if (dtype := pretrained.text("dtype")) not in DTYPES:
        raise pretrained.error(f"pretrained_config.dtype is {shortened(dtype)}, not one of {', '.join(DTYPES)}")
    _check_batching(config.path.parent, build, plugins)
    return CompiledEngine(
        version=version,
        dtype=dtype,
        vocab_size=pretrained.count("vocab_size"),
        world_size=mapping.count("world_size"),
        tp_size=mapping.count("tp_size"),
        pp_size=mapping.count("pp_size", 1),
        cp_size=mapping.count("cp_size", 1),
        max_sequence_length=build.count("max_seq_len"),
        max_batch_size=build.count("max_batch_size"),
        max_num_tokens=build.count("max_num_tokens"),
        tokens_per_block=plugins.count("tokens_per_block"),
        paged_context_fmha=plugins.flag("use_paged_context_fmha"),
        gather_generation_logits=build.flag("gather_generation_logits", default=False),
        eos_token_ids=eos_token_ids(config.path.parent, pretrained),
    )


def check_engine(path: Path, engine: CompiledEngine, *, world_size: int, installed: str | None) -> None:
    """Raise EngineError unless the `installed` TensorRT-LLM can run the engines in `path` on `world_size` GPUs."""
    here, built = release(installed), release(engine.version)
    if here is not None and here > LAST_WITH_ENGINES:
        raise EngineError(
            f"{path} holds compiled engines, which TensorRT-LLM {installed} no longer runs: install tensorrt-llm "
            f"<= 1.2 (they are of {engine.version}), or serve the Hugging Face checkpoint itself"
        )
    if here is not None and built is not None and here != built:
        raise EngineError(
            f"{path} was built by TensorRT-LLM {engine.version}, and {installed} is installed, which cannot run it: "
            f"{REBUILD} of {installed}, or install tensorrt-llm {engine.version}"
        )
    if engine.world_size != world_size:
        raise EngineError(
            f"{path} was built for {count_of_gpus(engine.world_size)}, this replica has {world_size}: start with "
            f"--num-shard {engine.world_size}, or build the engines again for {world_size}"
        )
    _check_files(path, engine.world_size)


def release(version: object) -> tuple[int, int] | None:
    """Return the major and minor number of a version; None if it cannot be parsed."""
    found = _VERSION.fullmatch(version) if isinstance(version, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def count_of_gpus(count: int) -> str:
    """Return "1 GPU", "2 GPUs", …"""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _check_batching(path: Path, build: JsonObject, plugins: JsonObject) -> None:
    """Raise EngineError unless the build allows in-flight batching of single sequences.

    Source: `ModelConfig::supportsInflightBatching` in cpp/include/tensorrt_llm/runtime/modelConfig.h. Beam search disables the
    prefix cache of an engine and is not offered here.
    """
    # In either case, and paged_kv_cache takes precedence (`parseBuilderConfig`, `parsePluginConfig`).
    kind = build.text("kv_cache_type").upper()
    if kind not in ("PAGED", "CONTINUOUS", "DISABLED"):
        raise build.error(f"build_config.kv_cache_type is {shortened(kind)}, not PAGED")
    if not plugins.flag("paged_kv_cache") and kind != "PAGED":
        raise EngineError(f"{path}: its KV cache is {kind}, not paged; {REBUILD} --kv_cache_type paged")
    if not plugins.flag("remove_input_padding"):
        raise EngineError(f"{path}: it was built with padded input; {REBUILD} --remove_input_padding enable")
    if (beams := build.count("max_beam_width")) != 1:
        raise EngineError(
            f"{path}: it was built for beams of {beams}, and a request is one sequence; {REBUILD} --max_beam_width 1"
        )


def _check_files(path: Path, world_size: int) -> None:
    """Raise EngineError unless there is a file that is not empty for each rank."""
    for rank in range(world_size):
        name = f"rank{rank}.engine"
        try:
            file = find_file(path, name)
            size = file.stat().st_size if file.is_file() else None
            problem = _plan_problem(file) if size else f"is {'missing' if size is None else 'empty'}"
        except ModelFileError as error:
            raise EngineError(str(error)) from None
        except OSError as error:
            raise EngineError(f"{path / name} cannot be read: {error.strerror or error}") from None
        if problem and size:
            raise EngineError(f"{path / name}: {problem}: {REBUILD}")
        if problem:
            raise EngineError(
                f"{path}: {name} {problem}, one of the engines for {count_of_gpus(world_size)}: copy the whole folder "
                f"again, or {REBUILD}"
            )


def _plan_problem(file: Path) -> str | None:
    """Return why the installed TensorRT cannot run a plan: another version built it. None if it can, or that is unknown."""
    installed = next(
        (found.version for name in ("tensorrt", "tensorrt-cu13") for found in distributions(name=name)), ""
    )
    with file.open("rb") as plan:
        header = plan.read(_PLAN_HEADER.size).ljust(_PLAN_HEADER.size)
    tag, layout, *built = _PLAN_HEADER.unpack(header)
    numbers = [int(part) for part in installed.split(".")[: len(built)] if part.isdecimal()]
    if (tag, layout) != (b"ftrt", 0) or built[: len(numbers)] == numbers:
        return None
    return f"TensorRT {'.'.join(map(str, built))} built it, and {installed} is installed, which cannot run it"
