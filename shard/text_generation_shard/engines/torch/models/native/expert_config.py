"""The mixture of experts of a config.json: its sizes, its router, and the layers that have one."""

from __future__ import annotations

from dataclasses import dataclass

from text_generation_shard.json_object import JsonObject


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """The experts of a model_type: names in its checkpoints, and defaults of the fields that config.json may omit."""

    count: int
    """Default of num_experts or num_local_experts; 0: config.json must have it, as for the other sizes."""
    each: int
    """Default of `each_field`."""
    each_field: str = "num_experts_per_tok"
    enabled_by: str | None = None
    """The field without which a config.json has no experts; None: it always has them."""
    beside_mlp: bool = False
    """True: each layer has a dense MLP too, and adds both outputs (Gemma 4)."""
    inner: int | None = None
    """Default of moe_intermediate_size; None: experts have intermediate_size."""
    shared_inner: int | None = None
    """Default of shared_expert_intermediate_size; None: no expert is shared by all tokens."""
    normalize: bool | tuple[str, bool] = True
    """True: the weights of a token's experts sum to one; or the field that says so, with its default."""
    sparse_layers: bool = False
    """True: decoder_sparse_step and mlp_only_layers say which layers have experts; False: all."""
    module: str = "mlp"
    """The module of router and experts; empty: the layer."""
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's projections in checkpoints with one tensor for each expert."""
    clamped: bool = False
    """True: the experts of gpt-oss, with biases, interleaved gate and up, weights [experts, inputs, outputs]."""


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The mixture of experts of a model."""

    family: ExpertFamily
    count: int
    each: int
    """Experts of a token."""
    inner: int
    shared_inner: int
    """0: no expert is shared by all tokens."""
    normalize: bool
    layers: tuple[bool, ...]
    """For each layer, True if it has experts."""
    activation: str
    alpha: float = 0.0
    limit: float = 0.0
    """For "clamped_swiglu" alone: see GatedActivation."""


def read_experts(raw: JsonObject, family: ExpertFamily | None, num_layers: int, activation: str) -> ExpertConfig | None:
    """Read the experts of a config.json; None without. Raises EngineError with a one-line message."""
    if family is None or (family.enabled_by is not None and not raw.flag(family.enabled_by, default=False)):
        return None
    key = "num_local_experts" if "num_local_experts" in raw and "num_experts" not in raw else "num_experts"
    count, each = raw.count(key, family.count or None), raw.count(family.each_field, family.each or None)
    if each > count:
        raise raw.error(f"{family.each_field} is {each}, of {count} experts")
    normalize, shared = family.normalize, "shared_expert_intermediate_size"
    return ExpertConfig(
        family,
        count,
        each,
        inner=raw.count("intermediate_size" if family.inner is None else "moe_intermediate_size", family.inner or None),
        shared_inner=0 if family.shared_inner is None else raw.count(shared, family.shared_inner),
        normalize=normalize if isinstance(normalize, bool) else raw.flag(normalize[0], default=normalize[1]),
        layers=_layers(raw, family, num_layers),
        activation="clamped_swiglu" if family.clamped else activation,
        alpha=raw.number("swiglu_alpha", 1.702) if family.clamped else 0.0,
        limit=raw.number("swiglu_limit", 7.0) if family.clamped else 0.0,
    )


def _layers(raw: JsonObject, family: ExpertFamily, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer if it has experts, as Qwen2MoeDecoderLayer decides."""
    if not family.sparse_layers:
        return (True,) * num_layers
    step, dense = raw.count("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise raw.error("mlp_only_layers is not a list of layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
