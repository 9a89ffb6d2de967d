"""Reads and validates a checkpoint's config.json.

Reads the spellings of transformers 4 (`torch_dtype`, `rope_theta`, `rope_scaling`) and 5 (`dtype`, `rope_parameters`).
Models that this engine would compute wrongly are refused by name here, so that the model code has no checks.
"""

import math
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shortened

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.layers.rope import Rope
from text_generation_shard.engines.torch.models.native.expert_config import read_experts
from text_generation_shard.engines.torch.models.native.families import FAMILIES
from text_generation_shard.engines.torch.models.native.family import Family, Flag, Wrapper
from text_generation_shard.engines.torch.models.native.fused_experts import in_their_layout, without_fused_experts
from text_generation_shard.engines.torch.models.native.latent_config import read_latent, with_multipliers
from text_generation_shard.engines.torch.models.native.layer_config import (
    KEYS_AS_VALUES,
    read_intermediate_size,
    read_layers,
    with_images,
)
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig
from text_generation_shard.engines.torch.models.native.rope_config import FULL, SLIDING, read_ropes, rotated_layers
from text_generation_shard.engines.torch.models.native.state_config import (
    read_multipliers,
    read_states,
    with_layer_types,
)
from text_generation_shard.engines.torch.models.native.wrappers import TEXT_PARTS, WRAPPERS
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint
from text_generation_shard.engines.torch.weights.quantization.format import UnsupportedSchemeError
from text_generation_shard.engines.torch.weights.quantization.schemes import Scheme, choose_scheme, read_scheme
from text_generation_shard.json_object import MAX_COUNTS, JsonObject, eos_token_ids

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
USE_WINDOW = "use_sliding_window"
DTYPES = ("float16", "bfloat16", "float32")


def read_model_type(folder: Path) -> str:
    """Return the model_type of config.json, shortened. Raises EngineError."""
    return shortened(_read(folder, "config.json").text("model_type"))


def is_native(folder: Path) -> bool:
    """Return True if this engine knows the type of the model in `folder`. Raises EngineError."""
    raw = _text_part(_read(folder, "config.json"))
    return (raw.optional_text("model_type") or "") in FAMILIES


def read_model_config(folder: Path, quantize: str | None = None, whole: JsonObject | None = None) -> ModelConfig:
    """Read the config of the model in `folder`, its config.json or `whole`, served with --quantize `quantize`.

    Raises EngineError with a one-line message: UnsupportedError if transformers may compute the model.
    """
    whole = whole or _read(folder, "config.json")
    raw = _text_part(whole)
    model_type = raw.optional_text("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(name for name in FAMILIES if name not in TEXT_PARTS)
        raise raw.error(f"model_type {shortened(model_type)} is not supported, only {known}")
    family = FAMILIES[model_type]
    wrapper = WRAPPERS.get(whole.optional_text("model_type") or "")
    _check_architecture(whole, family.architecture if wrapper is None else wrapper.architecture)
    raw = raw.merged({name: raw.get(older) for older, name in family.older_fields if older in raw})
    if reason := _unsupported(raw, family):
        raise raw.unsupported(f"{reason}: only transformers computes such models")
    # With "vision", tokens of images alone attend to later ones.
    if raw.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise raw.error("use_bidirectional_attention: texts are generated with attention to earlier tokens only")
    scheme = without_fused_experts(folder, read_quantization(folder, raw, quantize))
    if scheme is not None and family.layer_multipliers:
        raise raw.unsupported("quantized weights cannot be multiplied by the factors of each projection")
    hidden_size = raw.count("hidden_size")
    num_heads = raw.count("num_attention_heads", family.num_heads)
    head_dim = raw.count("head_dim", family.head_dim or hidden_size // num_heads)
    if family.states is not None and family.states.single_parts:
        raw = with_layer_types(raw)
    num_layers = raw.count("num_hidden_layers")
    if family.depth_multipliers:
        raw = with_multipliers(raw, hidden_size, num_layers)
    windows = _windows(raw, family, num_layers)
    ropes = read_ropes(raw, family, windows)
    if (latent := read_latent(raw, family.latent, hidden_size, num_heads)) is not None:
        row = LayerShape(num_heads, 1, latent.rank + latent.rotated, latent=latent.rank)
        layers, interleaved = (row,) * num_layers, raw.flag("rope_interleave", default=family.interleaved_rotary)
        ropes = tuple(replace(rope, partial=1.0, interleaved=interleaved) for rope in ropes)
    else:
        layers = with_images(read_layers(raw, family, windows, num_heads, head_dim), wrapper, raw)
    for rope, width in {(rope, layer.rotated_dim): None for rope, layer in zip(ropes, layers, strict=True)}:
        if (rotated := rope.rotary_dim(width)) % 2:
            raise raw.unsupported(f"partial_rotary_factor rotates {rotated} of {width} dimensions, an odd number")
        if rope.factors and len(rope.factors) != rotated // 2:
            raise raw.error(f"longrope has {len(rope.factors)} factors for {rotated} dimensions")
    return ModelConfig(
        family=family,
        model_type=model_type,
        dtype=_dtype(raw),
        vocab_size=raw.count("vocab_size", family.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=read_intermediate_size(raw, family),
        num_heads=num_heads,
        layers=layers,
        activation=(activation := _activation(raw, family)),
        rms_norm_eps=raw.number(family.eps_field, family.rms_norm_eps),
        ropes=ropes,
        max_sequence_length=_max_sequence_length(raw, family, ropes),
        tie_word_embeddings=_ties(raw, family),
        qkv_bias=_flag(raw, family.qkv_bias),
        output_bias=_flag(raw, family.output_bias),
        mlp_bias=_flag(raw, family.mlp_bias),
        query_key_norm=_flag(raw, family.query_key_norm),
        values_are_keys=family.full_head_dim is not None and raw.flag(KEYS_AS_VALUES, default=False),
        attention_scale=_attention_scale(raw, family, head_dim) if latent is None else latent.scale(ropes[0]),
        attention_softcap=_softcap(raw, "attn_logit_softcapping", family.attention_softcap),
        final_softcap=_softcap(raw, "final_logit_softcapping", family.final_softcap),
        embedding_scale=_multiplier(raw, family, "embedding_multiplier")
        * (hidden_size**0.5 if family.scales_embedding else 1.0),
        residual_scale=_multiplier(raw, family, "residual_multiplier"),
        logits_divisor=_multiplier(raw, family, "logits_scaling")
        / (raw.number("lm_head_multiplier", 1.0) if family.layer_multipliers else 1.0),
        eos_token_ids=eos_token_ids(folder, raw),
        experts=in_their_layout(folder, read_experts(raw, family.experts, num_layers, activation), hidden_size),
        latent=latent,
        states=read_states(raw, family.states, num_layers, hidden_size),
        multipliers=read_multipliers(raw) if family.layer_multipliers else None,
        quantization=scheme,
        # A multiplier of embeddings would be one of images too.
        max_images=0 if wrapper is None or "vision_config" not in whole or family.multipliers else wrapper.max_images,
        image_levels=_image_levels(whole),
    )


def _image_levels(whole: JsonObject) -> int:
    """Return the number of rows of an image that a token gets: one more than the layers after which there is another."""
    vision = whole.get("vision_config")
    added = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    return 1 + (len(added) if isinstance(added, list) else 0)


def _check_architecture(whole: JsonObject, served: str) -> None:
    """Check that the config names the architecture that is served, or none. Raises EngineError."""
    architectures = whole.get("architectures") or [served]
    if not isinstance(architectures, list):
        raise whole.error(f"architectures is {shortened(architectures)}, not a list of names")
    if served not in architectures:
        raise whole.error(f"architecture {repr(architectures)[:200]} is not supported, only {served}")


def _read(folder: Path, name: str) -> JsonObject:
    try:
        return JsonObject.read(folder, name)
    except (FileNotFoundError, NotADirectoryError):
        raise EngineError(f"{folder / name} does not exist") from None


def _text_part(raw: JsonObject) -> JsonObject:
    """Return the config of the text part of a model of text and images, or `raw` itself."""
    wrapper = WRAPPERS.get(raw.optional_text("model_type") or "")
    if wrapper is None:
        return raw
    if "text_config" not in raw and not wrapper.is_flat:
        raise raw.error("text_config is missing")
    text = raw.decoder()
    is_fixed = text is raw or wrapper.text_type.endswith("_text")
    model_type = wrapper.text_type if is_fixed else text.optional_text("model_type") or wrapper.text_type
    return text.merged({"model_type": model_type, "tie_word_embeddings": _shares_head(raw, wrapper)})


def _shares_head(raw: JsonObject, wrapper: Wrapper) -> bool:
    """Return True if the output layer is the embedding: the checkpoint decides, because configs say it in several ways."""
    folder = raw.path.parent
    if not any(folder.glob("*.safetensors")):
        return raw.flag("tie_word_embeddings", default=wrapper.ties)
    return "lm_head.weight" not in Checkpoint(folder, text_only=True)


def _ties(raw: JsonObject, family: Family) -> bool:
    """Return tie_word_embeddings, unless the checkpoint has another output layer: transformers uses that one then."""
    ties, folder = raw.flag("tie_word_embeddings", default=family.tie_word_embeddings), raw.path.parent
    if not ties or not any(folder.glob("*.safetensors")):
        return ties
    checkpoint = Checkpoint(folder, text_only=True)
    names = "lm_head.weight", f"{family.names.embedding}.weight"
    if not all(name in checkpoint for name in names):
        return True
    head, embedding = (checkpoint.map([name])[name] for name in names)
    # A few rows tell copies from others.
    return head.shape == embedding.shape and bool((head[:16] == embedding[:16]).all())


def read_quantization(folder: Path, raw: JsonObject, asked: str | None) -> Scheme | None:
    """Read the quantization of config.json, else of ModelOpt's hf_quant_config.json beside it; compare it with --quantize."""
    source, given = raw, raw.get("quantization_config")
    if not given and (folder / (name := "hf_quant_config.json")).exists():
        source = _read(folder, name)
        given = source.get("quantization")
    if not given and asked is None:
        return None
    try:
        scheme = choose_scheme(read_scheme(given) if given else None, asked)
    except UnsupportedSchemeError as error:
        raise source.error(str(error)) from None
    return scheme


def _dtype(raw: JsonObject) -> str:
    dtype = raw.optional_text("dtype") or raw.optional_text("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise raw.error(f"dtype {shortened(dtype)} is not supported, only {', '.join(DTYPES)}")
    return dtype


def _activation(raw: JsonObject, family: Family) -> str:
    name = family.activation_field
    activation = raw.optional_text(name) or family.activation
    if family.gelu_by_tanh and activation == "gelu":
        return "gelu_pytorch_tanh"
    known = ACTIVATIONS if family.gated_mlp else ("relu2",)
    if activation not in known:
        raise raw.unsupported(f"{name} {shortened(activation)} is not supported, only {', '.join(known)}")
    return activation


def _unsupported(raw: JsonObject, family: Family) -> str | None:
    """Return the field for which this engine does not compute a model of a type that it knows, with its value."""
    values = ((name, raw.values.get(name, default)) for name, default in family.unsupported)
    return next((f"{name} is {shortened(value)}" for name, value in values if value), None)


def _flag(raw: JsonObject, flag: Flag) -> bool:
    return flag if isinstance(flag, bool) else raw.flag(flag[0], default=flag[1])


def _attention_scale(raw: JsonObject, family: Family, head_dim: int) -> float:
    match family.attention_scale:
        case "query_pre_attn_scalar":
            return 1.0 / math.sqrt(raw.number("query_pre_attn_scalar", 256.0))
        case "attention_multiplier" if not raw.is_null("attention_multiplier"):
            return raw.number("attention_multiplier", 1.0)
        case "one":
            return 1.0
        case _:
            return 1.0 / math.sqrt(head_dim)


def _softcap(raw: JsonObject, name: str, default: float | None) -> float | None:
    """Return the cap c of scores s, which become c·tanh(s / c). Null means none."""
    if name in raw and (default is not None or name == "final_logit_softcapping"):
        return raw.number(name)
    return None if raw.is_null(name) else default


def _multiplier(raw: JsonObject, family: Family, name: str) -> float:
    return raw.number(name, 1.0) if family.multipliers else 1.0


def _max_sequence_length(raw: JsonObject, family: Family, ropes: tuple[Rope, ...]) -> int:
    """Return max_position_embeddings, which includes the scaling factor, except in some YaRN checkpoints."""
    max_positions = raw.count("max_position_embeddings", family.max_positions)
    yarn = [int(rope.original_max_positions * rope.factor) for rope in ropes if rope.type == "yarn"]
    length = max([max_positions, *yarn])
    if length == 1:
        raise raw.error("max_position_embeddings is 1: there is no room for a new token")
    if length > MAX_COUNTS["max_position_embeddings"]:
        raise raw.error(f"YaRN extends the sequences to {length} positions, more than any model has")
    return length


def _windows(raw: JsonObject, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, as the config classes of transformers define it."""
    is_off = family.windows.startswith(USE_WINDOW) and not raw.flag(USE_WINDOW, default=False)
    if family.windows == "none" or is_off:
        return (None,) * num_layers
    # A null disables the window.
    has_window = "sliding_window" in raw or (family.window is not None and not raw.is_null("sliding_window"))
    window = raw.count("sliding_window", family.window) if has_window else None
    if family.windows in ("all layers", "use_sliding_window, all layers"):
        return (window,) * num_layers
    windows = _by_type(raw, family, num_layers, window)
    return (*windows[:-1], None) if family.windows == "layer_types, none in the last layer" else windows


def _by_type(raw: JsonObject, family: Family, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """Return the sliding window of each layer by its type in layer_types, or by its place."""
    types = raw.get("layer_types")
    if types is None:
        rotated = rotated_layers(raw, family, num_layers)
        return tuple(window if _is_sliding(raw, family, layer, rotated) else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise raw.error(f"layer_types must name {num_layers} layers")
    if unknown := [kind for kind in types if kind not in (FULL, SLIDING)]:
        raise raw.unsupported(f"layer types {shortened(unknown[:1])} are not supported")
    if SLIDING in types and window is None:
        raise raw.error("layer_types names layers with a window, and sliding_window is missing")
    return tuple(window if kind == SLIDING else None for kind in types)


def _is_sliding(raw: JsonObject, family: Family, layer: int, rotated: list[bool]) -> bool:
    """Return True if a layer has a window, without layer_types. `rotated` says which layers have a rotation."""
    if family.windows == "use_sliding_window, layers without rotation":
        return not rotated[layer]
    if family.windows == "use_sliding_window":
        first = raw.get("max_window_layers")
        return layer >= (first if isinstance(first, int) else 28)
    if family.windows == "use_sliding_window, every second layer":
        return layer % 2 == 0 and layer < raw.count("max_window_layers", 28)
    pattern = raw.count("sliding_window_pattern", family.window_pattern)
    return pattern == 1 or (layer + 1) % pattern != 0
