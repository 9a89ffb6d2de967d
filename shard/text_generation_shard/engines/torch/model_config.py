"""Reads and validates a checkpoint's config.json.

Reads the spellings of transformers 4 (`torch_dtype`, `rope_theta`, `rope_scaling`) and 5 (`dtype`, `rope_parameters`).
Models that this engine would compute wrongly are refused by name here, so that the model code has no checks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.quantization import KV_KEYS, Fp8Scheme, UnsupportedSchemeError, read_scheme

log = structlog.get_logger()

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""config.json's model_type, and the architecture of that type that generates text."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""`dynamic` and `longrope` are left out: they change the rotation with the sequence length, so keys cannot be cached."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding; the fields are those of transformers' `rope_parameters`."""

    type: str
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family decoder."""

    model_type: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    rms_norm_eps: float
    rope: Rope
    max_sequence_length: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    windows: tuple[int | None, ...]
    """For each layer, the number of positions it attends to, including the token's own; None: all."""
    eos_token_ids: tuple[int, ...]
    quantization: Fp8Scheme | None = None


def read_model_config(folder: Path) -> ModelConfig:
    """Read the config of the model in `folder`. Raises EngineError with a one-line message if it is not supported."""
    raw = _Json(folder / "config.json")
    model_type = raw.text("model_type", "")
    if model_type not in ARCHITECTURES:
        raise raw.error(f"model_type {model_type!r} is not supported, only {', '.join(ARCHITECTURES)}")
    architectures = raw.get("architectures") or [ARCHITECTURES[model_type]]
    if ARCHITECTURES[model_type] not in architectures:
        raise raw.error(f"architecture {architectures!r} is not supported, only {ARCHITECTURES[model_type]}")
    hidden_size = raw.count("hidden_size")
    num_heads = raw.count("num_attention_heads")
    num_kv_heads = raw.count("num_key_value_heads", num_heads)
    # Qwen3Config is the only one with a default head_dim.
    head_dim = raw.count("head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise raw.error(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise raw.error(f"head_dim {head_dim} is odd, rotary embeddings need pairs")
    activation = raw.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise raw.error(f"hidden_act {activation!r} is not supported, only {', '.join(ACTIVATIONS)}")
    max_positions = raw.count("max_position_embeddings")
    rope = _rope(raw, max_positions)
    all_biased = model_type in ("llama", "qwen3") and raw.flag("attention_bias")
    return ModelConfig(
        model_type=model_type,
        dtype=_dtype(raw),
        vocab_size=raw.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.count("intermediate_size"),
        num_layers=(num_layers := raw.count("num_hidden_layers")),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=activation,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_sequence_length=_max_sequence_length(rope, max_positions),
        tie_word_embeddings=raw.flag("tie_word_embeddings"),
        qkv_bias=all_biased or model_type == "qwen2",
        output_bias=all_biased,
        mlp_bias=model_type == "llama" and raw.flag("mlp_bias"),
        query_key_norm=model_type == "qwen3",
        windows=_windows(raw, model_type, num_layers),
        eos_token_ids=_eos_token_ids(folder, raw),
        quantization=_quantization(folder, raw),
    )


class _Json:
    """A JSON object read from a file; its getters check types and raise errors that name the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise EngineError(f"{path} does not exist") from None
        except (OSError, ValueError) as error:
            raise EngineError(f"{path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise EngineError(f"{path} does not hold a JSON object")
        self._values: dict[str, Any] = values

    def error(self, problem: str) -> EngineError:
        return EngineError(f"{self.path}: {problem}")

    def get(self, key: str) -> Any:  # noqa: ANN401 – JSON
        """Return the value at `key`; None if it is missing or null."""
        return self._values.get(key)

    def is_null(self, key: str) -> bool:
        """Return True if the key is present and null."""
        return key in self._values and self._values[key] is None

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._ill_typed(key, "a positive whole number")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        return default if value is None else self.as_number(key, value)

    def as_number(self, key: str, value: object) -> float:
        """Return `value` as a positive number; raise an error that names `key` if it is not one."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._ill_typed(key, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a boolean; a missing key is False."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._ill_typed(key, "true or false")
        return bool(value)

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self._ill_typed(key, "a string")
        return value or default

    def _ill_typed(self, key: str, wanted: str) -> EngineError:
        return self.error(f"{key} is missing" if self.get(key) is None else f"{key} must be {wanted}")


def _quantization(folder: Path, raw: _Json) -> Fp8Scheme | None:
    """Read the quantization of config.json, else of ModelOpt's hf_quant_config.json beside it."""
    source, given = raw, raw.get("quantization_config")
    path = folder / "hf_quant_config.json"
    if not given and path.exists():
        source = _Json(path)
        given = source.get("quantization")
    if not given:
        return None
    try:
        scheme = read_scheme(given)
    except UnsupportedSchemeError as error:
        raise source.error(str(error)) from None
    if asked := [given[key] for key in KV_KEYS if given.get(key)]:
        # Our KV cache is more precise than the checkpoint asks for; the scales for keys and values are not needed.
        log.info("the KV cache is not quantized", checkpoint_asks=asked[0])
    return scheme


def _dtype(raw: _Json) -> str:
    dtype = raw.text("dtype", "") or raw.text("torch_dtype", "float32")
    if dtype not in DTYPES:
        raise raw.error(f"dtype {dtype!r} is not supported, only {', '.join(DTYPES)}")
    return dtype


def _rope(raw: _Json, max_positions: int) -> Rope:
    """Port of transformers' `RotaryEmbeddingConfigMixin.convert_rope_params_to_dict`, for one set of parameters."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise raw.error("rope_parameters must be an object")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES or any(isinstance(value, dict) for value in given.values()):
        raise raw.error(f"rope type {kind!r} is not supported, only {', '.join(ROPE_TYPES)}, one for all layers")
    if (given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise raw.error("partial_rotary_factor is not supported")

    def number(key: str, default: float | None = None) -> float:
        value = given.get(key)
        if value is None and default is None:
            raise raw.error(f"{key} is missing, rope type {kind!r} needs it")
        return raw.as_number(key, default if value is None else value)

    theta = number("rope_theta", raw.number("rope_theta", 10_000.0))
    if kind == "default":
        return Rope(kind, theta)
    if kind == "linear":
        return Rope(kind, theta, factor=number("factor"))
    outer = raw.get("original_max_position_embeddings")
    original = int(number("original_max_position_embeddings", max_positions) if outer is None else outer)
    if kind == "llama3":
        return Rope(
            kind,
            theta,
            factor=number("factor"),
            original_max_positions=original,
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    return Rope(
        kind,
        theta,
        factor=number("factor", max_positions / original),
        original_max_positions=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=None if given.get("attention_factor") is None else number("attention_factor"),
        mscale=float(given.get("mscale") or 0.0),
        mscale_all_dim=float(given.get("mscale_all_dim") or 0.0),
        truncate=given.get("truncate") is not False,
    )


def _max_sequence_length(rope: Rope, max_positions: int) -> int:
    """Return max_position_embeddings, which includes the scaling factor, except in some YaRN checkpoints."""
    return max(max_positions, int(rope.original_max_positions * rope.factor)) if rope.type == "yarn" else max_positions


def _windows(raw: _Json, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, as MistralModel and Qwen2Config/Qwen3Config define it."""
    if model_type == "mistral":
        # MistralConfig has a default window; null disables it.
        window = None if raw.is_null("sliding_window") else raw.count("sliding_window", 4096)
        return (window,) * num_layers
    if model_type == "llama" or not raw.flag("use_sliding_window"):
        return (None,) * num_layers
    window = raw.count("sliding_window", 4096)
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers")
        first = 28 if first is None else first
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise raw.error(f"layer_types must name {num_layers} layers")
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise raw.error(f"layer types {sorted(unknown)} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _eos_token_ids(folder: Path, raw: _Json) -> tuple[int, ...]:
    """Return the EOS ids of generation_config.json, else of config.json: an id, a list, or none."""
    path = folder / "generation_config.json"
    found = _Json(path).get("eos_token_id") if path.exists() else None
    found = raw.get("eos_token_id") if found is None else found
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise raw.error("eos_token_id must be a token id or a list of them")
    return tuple(ids)
