"""Reads and validates a checkpoint's config.json.

Reads the spellings of transformers 4 (`torch_dtype`, `rope_theta`, `rope_scaling`) and 5 (`dtype`, `rope_parameters`).
Models that this engine would compute wrongly are refused by name here, so that the model code has no checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened

import structlog

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.attention.shape import LayerShape
from text_generation_shard.engines.torch.quantization.format import UnsupportedSchemeError
from text_generation_shard.engines.torch.quantization.schemes import (
    KV_KEYS,
    Scheme,
    read_scheme,
)
from text_generation_shard.json_object import MAX_COUNTS, JsonObject

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
    quantization: Scheme | None = None

    def layer_shapes(self, num_heads: int = 0, num_kv_heads: int = 0) -> tuple[LayerShape, ...]:
        """Return the shape of the attention of each layer, for all heads or for the heads of a rank."""
        heads = num_heads or self.num_heads, num_kv_heads or self.num_kv_heads
        return tuple(LayerShape(*heads, self.head_dim, window) for window in self.windows)

    @property
    def projection_weights(self) -> int:
        """Number of weights in the projections of all layers: nearly all weights but the embeddings."""
        attention = self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def embedding_weights(self) -> int:
        """Number of weights in the embeddings of tokens, and in the output layer unless it is the same."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)


def read_model_type(folder: Path) -> str:
    """Return the model_type of config.json, shortened. Raises EngineError."""
    return shortened(_read(folder, "config.json").text("model_type"))


def is_native(folder: Path) -> bool:
    """Return True if the model in `folder` is of a type that this engine computes itself. Raises EngineError."""
    return _read(folder, "config.json").optional_text("model_type") in ARCHITECTURES


def read_model_config(folder: Path) -> ModelConfig:
    """Read the config of the model in `folder`. Raises EngineError with a one-line message if it is not supported."""
    raw = _read(folder, "config.json")
    model_type = raw.optional_text("model_type")
    if model_type not in ARCHITECTURES:
        raise raw.error(f"model_type {shortened(model_type)} is not supported, only {', '.join(ARCHITECTURES)}")
    architectures = raw.get("architectures") or [ARCHITECTURES[model_type]]
    if not isinstance(architectures, list) or ARCHITECTURES[model_type] not in architectures:
        raise raw.error(f"architecture {repr(architectures)[:200]} is not supported, only {ARCHITECTURES[model_type]}")
    hidden_size = raw.count("hidden_size")
    num_heads = raw.count("num_attention_heads")
    num_kv_heads = raw.count("num_key_value_heads", num_heads)
    # Qwen3Config is the only one with a default head_dim.
    head_dim = raw.count("head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise raw.error(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise raw.error(f"head_dim {head_dim} is odd, rotary embeddings need pairs")
    activation = raw.optional_text("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise raw.error(f"hidden_act {shortened(activation)} is not supported, only {', '.join(ACTIVATIONS)}")
    max_positions = raw.count("max_position_embeddings")
    rope = _rope(raw, max_positions)
    all_biased = model_type in ("llama", "qwen3") and raw.flag("attention_bias", default=False)
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
        max_sequence_length=_max_sequence_length(raw, rope, max_positions),
        tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
        qkv_bias=all_biased or model_type == "qwen2",
        output_bias=all_biased,
        mlp_bias=model_type == "llama" and raw.flag("mlp_bias", default=False),
        query_key_norm=model_type == "qwen3",
        windows=_windows(raw, model_type, num_layers),
        eos_token_ids=eos_token_ids(folder, raw),
        quantization=_quantization(folder, raw),
    )


def _read(folder: Path, name: str) -> JsonObject:
    try:
        return JsonObject.read(folder, name)
    except (FileNotFoundError, NotADirectoryError):
        raise EngineError(f"{folder / name} does not exist") from None


def _quantization(folder: Path, raw: JsonObject) -> Scheme | None:
    """Read the quantization of config.json, else of ModelOpt's hf_quant_config.json beside it."""
    source, given = raw, raw.get("quantization_config")
    if not given and (folder / (name := "hf_quant_config.json")).exists():
        source = _read(folder, name)
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


def _dtype(raw: JsonObject) -> str:
    dtype = raw.optional_text("dtype") or raw.optional_text("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise raw.error(f"dtype {shortened(dtype)} is not supported, only {', '.join(DTYPES)}")
    return dtype


def _rope(raw: JsonObject, max_positions: int) -> Rope:
    """Port of transformers' `RotaryEmbeddingConfigMixin.convert_rope_params_to_dict`, for one set of parameters."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise raw.error("rope_parameters must be an object")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES or any(isinstance(value, dict) for value in given.values()):
        raise raw.error(
            f"rope type {shortened(kind)} is not supported, only {', '.join(ROPE_TYPES)}, one for all layers"
        )
    if (given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise raw.error("partial_rotary_factor is not supported")
    inner = JsonObject(raw.path, given, advice=f"; rope type {kind!r} needs it")
    number = inner.number
    if (theta := number("rope_theta", raw.number("rope_theta", 10_000.0))) <= 1:
        raise raw.error(f"rope_theta is {theta}, not above 1")
    if kind == "default":
        return Rope(kind, theta)
    if kind == "linear":
        return Rope(kind, theta, factor=number("factor"))
    key = "original_max_position_embeddings"
    original = raw.count(key) if key in raw else inner.count(key, max_positions)
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
        mscale=number("mscale") if given.get("mscale") else 0.0,
        mscale_all_dim=number("mscale_all_dim") if given.get("mscale_all_dim") else 0.0,
        truncate=given.get("truncate") is not False,
    )


def _max_sequence_length(raw: JsonObject, rope: Rope, max_positions: int) -> int:
    """Return max_position_embeddings, which includes the scaling factor, except in some YaRN checkpoints."""
    if rope.type != "yarn":
        return max_positions
    length = max(max_positions, int(rope.original_max_positions * rope.factor))
    if length > MAX_COUNTS["max_position_embeddings"]:
        raise raw.error(f"YaRN extends the sequences to {length} positions, more than any model has")
    return length


def _windows(raw: JsonObject, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, as MistralModel and Qwen2Config/Qwen3Config define it."""
    if model_type == "mistral":
        # MistralConfig has a default window; null disables it.
        window = None if raw.is_null("sliding_window") else raw.count("sliding_window", 4096)
        return (window,) * num_layers
    if model_type == "llama" or not raw.flag("use_sliding_window", default=False):
        return (None,) * num_layers
    window = raw.count("sliding_window", 4096)
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers")
        first = first if isinstance(first, int) else 28
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise raw.error(f"layer_types must name {num_layers} layers")
    if unknown := [kind for kind in types if kind not in ("full_attention", "sliding_attention")]:
        raise raw.error(f"layer types {shortened(unknown[:1])} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def eos_token_ids(folder: Path, raw: JsonObject) -> tuple[int, ...]:
    """Return the EOS ids of generation_config.json, else of config.json: an id, a list, or none."""
    name, key = "generation_config.json", "eos_token_id"
    if (folder / name).exists() and key in (generation := _read(folder, name)):
        return generation.token_ids(key)
    return raw.token_ids(key)
