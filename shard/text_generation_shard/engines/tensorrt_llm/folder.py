"""Determine the kind of a model folder, check that it can be served, and read the sizes of a Hugging Face model.

None of this imports TensorRT-LLM. config.json decides the kind, as in `get_model_format` of tensorrt_llm/llmapi/llm_args.py (1.2.1),
which takes every other folder for a Hugging Face checkpoint; here those are checked more closely.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.engine_folder import CompiledEngine, read_engine
from text_generation_shard.json_object import MAX_COUNTS, JsonObject, eos_token_ids, is_count

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "model_max_length")
"""Keys of config.json for the length of the longest sequence, in order of preference."""
SCALED_POSITIONS = ("su", "longrope", "llama3", "yarn")
"""Kinds of rope_scaling where max_position_embeddings includes the factor."""
MAX_ROPE_FACTOR = 1 << 10


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """Type, sizes and EOS tokens, given to TensorRT-LLM: its worker process does not report the values that it uses."""

    model_type: str
    dtype: str
    """Data type of the checkpoint; "" if unknown."""
    vocab_size: int
    max_sequence_length: int
    eos_token_ids: tuple[int, ...]
    rope_factor: float = 1.0
    """Factor by which TensorRT-LLM extends the longest sequence."""
    has_latent_attention: bool = False


def inspect_folder(path: Path) -> CompiledEngine | JsonObject:
    """Return the build of the compiled engines in a folder, or the config.json of a Hugging Face checkpoint. Raises EngineError."""
    config = _read_config(path)
    marks = [mark in config for mark in ("pretrained_config", "build_config")]
    if all(marks) or (any(marks) and "architectures" not in config):
        return read_engine(config)
    if "architectures" in config:
        names = config.get("architectures")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise config.error("architectures must be a list of the model's class, such as LlamaForCausalLM")
        return config
    # Other libraries write `architecture` as well: require a second sign.
    if "architecture" in config and ("dtype" in config or _has(path, "rank*.safetensors")):
        raise EngineError(
            f"{path} is a TensorRT-LLM checkpoint, not built yet: serve the Hugging Face checkpoint it was converted from, or "
            f"run trtllm-build --checkpoint_dir {path} --output_dir {path}-engine (tensorrt-llm <= 1.2) and serve {path}-engine"
        )
    if "model_type" in config:
        raise config.error("architectures is missing: name the model's class there, such as LlamaForCausalLM")
    raise config.error(
        "describes no Hugging Face checkpoint (architectures) and no compiled engines (pretrained_config, build_config): "
        "name the folder of a model"
    )


def read_hugging_face_model(config: JsonObject, options: Mapping[str, object] | None = None) -> HuggingFaceModel:
    """Return the model that `config`, a config.json, and generation_config.json beside it describe. Raises EngineError.

    A length or a vocabulary that config.json leaves to the model's class is read from the class, as TensorRT-LLM does; a length
    that is unknown there as well is the operator's `max_seq_len`.
    """
    folder, text = config.path.parent, config.decoder()
    for key, most in MAX_COUNTS.items():
        if isinstance(value := text.get(key), int | float) and value > most:
            raise config.error(f"{key} is {shortened(value)}, more than {most}")
    length = next((text.get(key) for key in LENGTH_KEYS if is_count(text.get(key))), None)
    vocab_size = text.get("vocab_size")
    if "model_type" in config and (length is None or vocab_size is None):
        defaults = _class_defaults(folder)
        length = length or defaults.get(LENGTH_KEYS[0]) or (options or {}).get("max_seq_len")
        vocab_size = vocab_size if vocab_size is not None else defaults.get("vocab_size")
    if not is_count(length):
        raise EngineError(
            f"{config.path} does not say how long a sequence may be ({LENGTH_KEYS[0]}): "
            "give --trtllm-options 'max_seq_len: …'"
        )
    if not is_count(vocab_size):
        raise EngineError(f"{config.path} does not say how large the vocabulary is (vocab_size)")
    return HuggingFaceModel(
        model_type=str(config.get("model_type") or ""),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or ""),
        vocab_size=vocab_size,
        max_sequence_length=length,
        eos_token_ids=eos_token_ids(folder, text),
        rope_factor=_rope_factor(text.get("rope_scaling")),
        has_latent_attention="kv_lora_rank" in text,
    )


def _class_defaults(folder: Path) -> dict[str, Any]:
    """Return the values of the model's class in transformers, which TensorRT-LLM brings; empty if it does not know the model."""
    try:
        transformers = import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        ).get_text_config()
    except Exception:  # noqa: BLE001 - the caller names the value that is missing
        return {}
    return {key: value for key in (LENGTH_KEYS[0], "vocab_size") if is_count(value := getattr(config, key, None))}


def _rope_factor(scaling: object) -> float:
    """Return the factor by which TensorRT-LLM extends the positions (_infer_max_seq_len_from_config)."""
    if not isinstance(scaling, dict) or scaling.get("type", scaling.get("rope_type")) in SCALED_POSITIONS:
        return 1.0
    factor = scaling.get("factor", 1.0)
    return float(factor) if isinstance(factor, int | float) and 1 <= factor <= MAX_ROPE_FACTOR else 1.0


def _read_config(path: Path) -> JsonObject:
    try:
        return JsonObject.read(path)
    except NotADirectoryError:
        raise EngineError(f"{path} is a file: name the folder of a model") from None
    except FileNotFoundError:
        pass
    if not path.exists():
        raise EngineError(f"the model folder {path} does not exist")
    if _has(path, "rank*.engine"):
        raise EngineError(f"{path} has engines but no config.json: copy the whole folder that trtllm-build wrote")
    raise EngineError(f"{path} has no config.json: name the folder of a model, or download the whole of it again")


def _has(path: Path, pattern: str) -> bool:
    return next(path.glob(pattern), None) is not None
