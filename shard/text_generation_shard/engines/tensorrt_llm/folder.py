"""What a model folder is, and whether it can be served here: settled before TensorRT-LLM is imported.

The kinds are told apart by config.json, as `get_model_format` in tensorrt_llm/llmapi/llm_args.py (1.2.1) does it. What it
takes for a Hugging Face checkpoint because it is nothing else is looked at more closely.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.engine_folder import (
    LAST_WITH_ENGINES,
    REBUILD,
    CompiledEngine,
    JsonObject,
    check_engine,
    count_of_gpus,
    read_engine,
    release,
)


class FolderKind(Enum):
    """What the files of a folder are."""

    HUGGING_FACE = "Hugging Face checkpoint"
    ENGINE = "compiled engines"
    CHECKPOINT = "TensorRT-LLM checkpoint"
    """Converted weights that `trtllm-build` (≤ 1.2) makes engines of."""
    OLD_ENGINE = "compiled engines of TensorRT-LLM before 0.8"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with a model."""

    path: Path
    kind: FolderKind
    architecture: str
    """The class of the model, as LlamaForCausalLM; "" for OLD_ENGINE."""
    engine: CompiledEngine | None = None
    """For ENGINE alone: what was settled when it was built."""


def inspect_folder(path: Path) -> ModelFolder:
    """What is in `path`. Raises EngineError if it is no model, or says of itself what cannot be."""
    config = _read_config(path)
    marks = [mark in config for mark in ("pretrained_config", "build_config")]
    if all(marks) or (any(marks) and "architectures" not in config):
        engine = read_engine(config)
        return ModelFolder(path, FolderKind.ENGINE, engine.architecture, engine)
    if "architectures" in config:
        return ModelFolder(path, FolderKind.HUGGING_FACE, _first_architecture(config))
    if "builder_config" in config:
        return ModelFolder(path, FolderKind.OLD_ENGINE, "")
    # A lone `architecture` is also what other libraries write, so one more sign is asked for.
    if "architecture" in config and ("dtype" in config or _has(path, "rank*.safetensors")):
        advised = config.advising("convert the checkpoint again")
        return ModelFolder(path, FolderKind.CHECKPOINT, advised.text("architecture"))
    if "model_type" in config:
        raise config.error("architectures is missing: name the model's class there, such as LlamaForCausalLM")
    raise config.error(
        "describes no Hugging Face checkpoint (architectures) and no compiled engines (pretrained_config, build_config): "
        "name the folder of a model"
    )


def check_folder(folder: ModelFolder, *, world_size: int, installed: str | None, gpus: int | None) -> None:
    """Whether `folder` can be served on `world_size` GPUs by the `installed` version of TensorRT-LLM. Raises EngineError.

    `gpus` are those that can be seen. What is None is not known, and what depends on it not checked.
    """
    path = folder.path
    if folder.kind is FolderKind.CHECKPOINT:
        raise EngineError(f"{path} is a TensorRT-LLM checkpoint, not built yet: {_how_to_build(path, installed)}")
    if folder.kind is FolderKind.OLD_ENGINE:
        raise EngineError(
            f"{path} holds engines built by a TensorRT-LLM before 0.8, which no later one can run: {REBUILD} of "
            f"tensorrt-llm <= 1.2, or serve the Hugging Face checkpoint itself"
        )
    if folder.engine is not None:
        check_engine(path, folder.engine, world_size=world_size, installed=installed)
    if gpus is not None and gpus < world_size:
        raise EngineError(
            f"{path} is to be served on {count_of_gpus(world_size)}, but only {gpus} can be seen: let this replica see more "
            f"(CUDA_VISIBLE_DEVICES), or start with a smaller --num-shard"
        )


def _how_to_build(path: Path, installed: str | None) -> str:
    command = f"trtllm-build --checkpoint_dir {path} --output_dir {path}-engine"
    here = release(installed)
    if here is None or here <= LAST_WITH_ENGINES:
        return f"run {command} (tensorrt-llm <= 1.2) and serve {path}-engine"
    return (
        f"serve the Hugging Face checkpoint it was converted from; TensorRT-LLM {installed} builds no engines any more, "
        f"tensorrt-llm <= 1.2 does: {command}"
    )


def _read_config(path: Path) -> JsonObject:
    try:
        return JsonObject.read(path / "config.json")
    except NotADirectoryError:
        raise EngineError(f"{path} is a file: name the folder of a model") from None
    except FileNotFoundError:
        pass
    if not path.exists():
        raise EngineError(f"the model folder {path} does not exist")
    if _has(path, "rank*.engine"):
        raise EngineError(f"{path} has engines but no config.json: copy the whole folder that trtllm-build wrote")
    raise EngineError(f"{path} has no config.json: name the folder of a model, or download the whole of it again")


def _first_architecture(config: JsonObject) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise config.error("architectures must be a list of the model's class, such as LlamaForCausalLM")
    return str(names[0])


def _has(path: Path, pattern: str) -> bool:
    return next(path.glob(pattern), None) is not None
