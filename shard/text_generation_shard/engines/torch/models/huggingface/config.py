"""The config of a model as transformers reads it, and the facts of it that the engine needs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch

from text_generation_common.one_line import one_line
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.models.huggingface.library import (
    VERSION,
    LibraryConfig,
    LibraryModel,
    base_of,
    config_from_json,
    decoder_class,
    is_known,
    share_conversions,
    silence,
)
from text_generation_shard.engines.torch.models.huggingface.states import state_layers
from text_generation_shard.engines.torch.models.native.config import DTYPES, read_quantization
from text_generation_shard.engines.torch.models.native.rope_config import check_rope_numbers
from text_generation_shard.engines.torch.models.native.wrappers import WRAPPERS
from text_generation_shard.engines.torch.weights.quantization.schemes import Scheme
from text_generation_shard.json_object import MAX_COUNTS, JsonObject, eos_token_ids

EXPERTS_EACH = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""Keys of the number of experts of a token."""
MAX_EXPERTS = 1 << 15
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
EMBEDS_IMAGES = ("idefics3", "internvl", "llama4", "llava", "llava_next", "llava_onevision", "mistral3", "smolvlm")
"""Model types in which images are embeddings and nothing more: no positions in axes, no sums after layers, no attention to later tokens."""
ROPE_THAT_CHANGES = ("dynamic", "longrope")
"""Rotations that depend on the length of the sequence: cached keys are valid up to the original length only."""


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """A model that transformers runs; for a model of several modalities, its text part."""

    library: LibraryConfig
    """The config that the class takes."""
    model_class: LibraryModel
    model_type: str
    dtype: str
    vocab_size: int
    max_sequence_length: int
    eos_token_ids: tuple[int, ...]
    projection_weights: int
    active_weights: int
    """Number of weights beside the embeddings."""
    embedding_weights: int
    base_name: str
    """The attribute of the model's part whose output the LM head gets."""
    has_states: bool
    """True if it has layers with a state."""
    max_images: int = 0
    """Images that a prompt may have."""
    quantization: Scheme | None = None
    """The formats of the checkpoint's weights, which are dequantized."""


def read_config(folder: Path, quantize: str | None = None) -> TransformersConfig:
    """Read config.json; `quantize` is the value of --quantize. Raises EngineError if transformers cannot run the model."""
    silence()
    raw = JsonObject.read(folder)
    model_type = raw.text("model_type")
    if not is_known(model_type):
        raise raw.error(f"transformers {VERSION} knows no model_type {shortened(model_type)}")
    _check_sizes(raw, raw.values)
    check_rope_numbers(raw)
    scheme = read_quantization(folder, raw.decoder(), quantize)
    if scheme is not None and scheme.online:
        raise raw.error(f"--quantize {quantize}: the weights of a model that transformers runs are not quantized")
    try:
        whole = config_from_json(unquantized(raw.values))
        text = whole.get_text_config(decoder=True)
        found = decoder_class(whole)
        if found is None:
            raise raw.error(
                f"transformers {VERSION} has no model of type {shortened(text.model_type)} that generates text"
            )
        model_class, library = found
        if library is not whole:
            share_conversions(whole, model_class)
        with torch.device("meta"):
            model = model_class(library)
        base = base_of(model)
        embeddings = model.get_input_embeddings().weight.numel()
    except EngineError:
        raise
    except Exception as error:  # noqa: BLE001 – the library checks values in many ways
        raise raw.error(f"transformers {VERSION} does not take it: {one_line(error)}") from None
    weights = sum(parameter.numel() for parameter in model.parameters())
    return TransformersConfig(
        library=library,
        model_class=model_class,
        model_type=text.model_type,
        dtype=_dtype(raw, whole),
        vocab_size=JsonObject(raw.path, {"vocab_size": text.vocab_size}).count("vocab_size"),
        max_sequence_length=_max_sequence_length(raw, text),
        eos_token_ids=eos_token_ids(
            folder, raw if "eos_token_id" in raw else raw.merged({"eos_token_id": getattr(text, "eos_token_id", None)})
        ),
        projection_weights=weights - embeddings,
        active_weights=weights - embeddings - _idle_experts(model, text),
        embedding_weights=embeddings,
        has_states=bool(state_layers(model)),
        quantization=scheme,
        max_images=WRAPPERS[model_type].max_images if model_type in EMBEDS_IMAGES else 0,
        base_name=next(name for name, module in model.named_modules() if module is base),
    )


def unquantized(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without its quantization: the library would quantize the model's layers."""
    kept = {key: value for key, value in values.items() if key != "quantization_config"}
    return kept | {key: unquantized(inner) for key, inner in kept.items() if key == "text_config" and inner}


def _idle_experts(model: torch.nn.Module, text: LibraryConfig) -> int:
    """Return the number of weights of the experts that a token is not multiplied with."""
    each = next((getattr(text, key) for key in EXPERTS_EACH if isinstance(getattr(text, key, None), int)), 1)
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    return sum(weight[each:].numel() for weight in experts)


def _check_sizes(raw: JsonObject, values: Mapping[str, Any]) -> None:
    """Raise EngineError if a size is beyond any model's: a config class may build lists of that length."""
    for name, value in _numbers(values):
        most = MAX_COUNTS.get(name)
        if "layer" in name and "size" not in name:  # not vocab_size_per_layer_input
            most = MAX_COUNTS["num_hidden_layers"]
        elif "expert" in name or name == "num_labels":
            most = MAX_EXPERTS
        if most is not None and abs(value) > most:
            raise raw.error(f"{name} is {shortened(value)}, above {most}")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield name, value


def _dtype(raw: JsonObject, whole: LibraryConfig) -> str:
    name = str(whole.dtype or whole.get_text_config().dtype or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise raw.error(f"dtype {shortened(name)} is not supported, only {', '.join(DTYPES)}")
    return name


def _max_sequence_length(raw: JsonObject, text: LibraryConfig) -> int:
    """Return the number of positions; for a rotation that changes with the length, those before its first change."""
    names = [name for name in LENGTH_KEYS if isinstance(getattr(text, name, None), int)]
    if not names:
        raise raw.error(f"no length of the longest sequence: one of {', '.join(LENGTH_KEYS)} is needed")
    longest = JsonObject(raw.path, {"max_position_embeddings": getattr(text, names[0])}).count(
        "max_position_embeddings"
    )
    for rope in _ropes(text):
        kind = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if kind in ROPE_THAT_CHANGES and isinstance(original, int):
            longest = min(longest, max(1, original))
    return longest


def _ropes(text: LibraryConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of the rotary embeddings: one set, or one for each kind of layer."""
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if isinstance(given, dict):
        yield given
        yield from (inner for inner in given.values() if isinstance(inner, dict))
