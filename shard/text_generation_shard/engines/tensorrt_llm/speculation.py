"""Speculative decoding: the argument `speculative_config`, and the requests that it excludes.

1.2 and 1.3 differ in the form of the argument, in the name of a draft model's type, and in the drafters that are part of the
model. Options may be written for either version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.library import DECODING_CONFIGS, Library, explain
from text_generation_shard.engines.tensorrt_llm.options import FLAG

NAME = "speculative_config"
IN_MODEL = {
    "MTP": "mtp_eagle_one_model",
    "Eagle": "eagle3_one_model",
    "Eagle3": "eagle3_one_model",
    **dict.fromkeys(("SA", "PARD", "DFlash", "DSpark"), ""),
}
"""Drafters that are part of the model → the field that may say otherwise."""
BESIDE_MODEL = ("NGram", "Auto")
"""Drafters without a model. Auto is NGram, where the batch is small."""
_SPELLED = {"DraftTarget": "Draft_Target", "Auto": "AUTO"}
"""decoding_type as the library spells it, where that differs."""


@dataclass(frozen=True, slots=True)
class Speculation:
    argument: object
    """The value of `speculative_config` for the installed version."""
    kind: str
    in_model: bool
    """The drafter is part of the model. Its sampler scales and filters, and ignores all other parameters."""
    has_draft_engine: bool
    """A second engine drafts. 1.2 makes it slower if guided decoding is on (py_executor_creator.py, use_chain_drafter)."""
    reserved_tokens: int
    """Tokens that a sequence needs more in the KV cache: two drafts, as the next step begins before the last one is accepted."""


def read_speculation(library: Library, options: Mapping[str, object]) -> Speculation | None:
    """Return the drafter that the options ask for; None if there is none. Raises EngineError."""
    given = options.get(NAME)
    if given is None:
        return None
    kinds = ", ".join(DECODING_CONFIGS)
    if not isinstance(given, Mapping):
        raise EngineError(f"{FLAG}: {NAME} must be a mapping with decoding_type, one of {kinds}")
    kind = str(given.get("decoding_type")).replace("_", "")  # 1.2: DraftTarget, 1.3: Draft_Target
    kind = "Auto" if kind == "AUTO" else kind
    if kind not in DECODING_CONFIGS:
        raise EngineError(f"{FLAG}: {NAME}: decoding_type must be one of {kinds}, not {kind[:80]!r}")
    fields: dict[str, Any] = {str(name): value for name, value in given.items()}
    configs = library.decoding_configs
    typed = all("decoding_type" in each.model_fields for each in configs.values())
    in_model = bool(fields.get(IN_MODEL[kind], True)) if kind in IN_MODEL else kind == "DraftTarget" and typed
    argument: object = fields | {"decoding_type": _SPELLED.get(kind, kind)}
    if not typed:
        # 1.2 has one class for Eagle and Eagle3.
        if (cls := configs.get("Eagle" if kind == "Eagle3" else kind)) is None:
            raise EngineError(f"{FLAG}: {NAME}: the installed TensorRT-LLM has no drafter {kind}")
        del fields["decoding_type"]
        argument = _construct(cls, fields, in_model=in_model)
    lengths = [given.get(name) for name in ("max_draft_len", "max_total_draft_tokens", "num_nextn_predict_layers")]
    reserved = 2 * max(length for length in (*lengths, 1) if isinstance(length, int))
    return Speculation(argument, kind, in_model, not in_model and kind not in BESIDE_MODEL, reserved)


def _construct(cls: type[Any], fields: dict[str, Any], *, in_model: bool) -> object:
    """Return the argument for 1.2, whose LLM accepts no mapping: `decoding_type` is not a field of its classes."""
    if cls.__name__.startswith("MTP"):
        # 1.2 reads the length from this argument only.
        length = fields.pop("max_draft_len", 1)
        fields.setdefault("num_nextn_predict_layers", length)
    if in_model:
        # Otherwise every request is greedy, also one that samples.
        fields.setdefault("allow_advanced_sampling", True)
    try:
        return cls(**fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise EngineError(f"{FLAG}: {NAME}: {explain(error)}") from error
