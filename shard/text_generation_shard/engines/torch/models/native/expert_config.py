"""The mixture of experts of a config.json: its sizes, its router, and the layers that have one."""

from dataclasses import dataclass, replace

from text_generation_shard.json_object import JsonObject

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts."""


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """The experts of a model_type: names in its checkpoints, and defaults of the fields that config.json may omit."""

    count: int
    """Default of the number of experts; 0: config.json must have it, as for the other sizes."""
    each: int
    """Default of `each_field`."""
    each_field: str = "num_experts_per_tok"
    enabled_by: str | None = None
    """The field without which a config.json has no experts; None: it always has them."""
    optional: bool = False
    """True: a config.json with zero experts has none."""
    beside_mlp: bool = False
    """True: each layer has a dense MLP too, and adds both outputs (Gemma 4)."""
    inner: int | None = None
    """Default of moe_intermediate_size; None: experts have intermediate_size."""
    shared_inner: int | None = None
    """Default of `shared_field`; None: no expert is shared by all tokens."""
    shared_field: str = "shared_expert_intermediate_size"
    shared_module: str = "mlp.shared_expert"
    shared_count: int = 0
    """Default of n_shared_experts, which together are the shared expert; 0: `shared_field` has its size."""
    shared_gate: bool = True
    """True: the output of the shared expert is multiplied by a gate of each token."""
    normalize: bool | tuple[str, bool] = True
    """True: the weights of a token's experts sum to one; or the field that says so, with its default."""
    sparse_layers: bool = False
    """True: decoder_sparse_step and mlp_only_layers say which layers have experts; False: all."""
    dense_layers: tuple[str, int] | None = None
    """The field with the number of layers without experts, which come first, and its default."""
    sigmoid: bool = False
    """True: probabilities are sigmoids; use_expert_bias says if experts have a bias by which they are chosen."""
    choice_bias: str = "expert_bias"
    """Name of the bias."""
    eps: float = 1e-6
    """Added to the sum by which sigmoids are normalized."""
    scale: float = 1.0
    """Default of routed_scaling_factor."""
    groups: tuple[int, int] = (1, 1)
    """Defaults of n_group and topk_group."""
    group_best: int = 0
    """See Routing; 1: of DeepSeek V2, whose topk_method says if there are groups; 0: there are none."""
    layer_type: str = ""
    """The type in layer_types of the layers with experts; empty: other fields say which have some."""
    module: str = "mlp"
    """The module of router and experts; empty: the layer."""
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's projections in checkpoints with one tensor for each expert; the first is not used without a gate."""
    fused_module: str = "mlp"
    """The module that has the tensors of all experts in checkpoints with one for gate and up, and one for down."""
    fused_names: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    may_transpose: bool = False
    """True: the tensors of all experts may be [experts, inputs, outputs]."""
    clamped: bool = False
    """True: the experts of gpt-oss, with biases, interleaved gate and up, weights [experts, inputs, outputs]."""


DENSE = "first_k_dense_replace"
SIGMOID_EXPERTS = ExpertFamily(
    256,
    8,
    inner=2048,
    shared_module="mlp.shared_experts",
    shared_count=1,
    shared_gate=False,
    normalize=("norm_topk_prob", True),
    dense_layers=(DENSE, 3),
    sigmoid=True,
    choice_bias="gate.e_score_correction_bias",
    eps=1e-20,
    scale=2.5,
    groups=(8, 4),
    group_best=2,
)
SOFTMAX_EXPERTS = replace(SIGMOID_EXPERTS, sigmoid=False, dense_layers=(DENSE, 0), scale=1.0, groups=(1, 1))
NEMOTRON_EXPERTS = replace(
    SIGMOID_EXPERTS,
    count=8,
    each=2,
    inner=7688,
    shared_inner=7688,
    shared_field="moe_shared_expert_intermediate_size",
    shared_module="mixer.shared_experts",
    shared_count=0,
    scale=1.0,
    groups=(1, 1),
    layer_type="moe",
    module="mixer",
    fused_module="mixer",
    fused_names=("experts.up_proj", "experts.down_proj"),
)


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
    scale: float = 1.0
    """Factor of the weights of a token's experts."""
    groups: tuple[int, int] = (1, 1)
    transposed: bool = False
    """True: the tensors of all experts are [experts, inputs, outputs]."""
    chosen_by_bias: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    """For "clamped_swiglu" alone: see GatedActivation."""


def read_experts(raw: JsonObject, family: ExpertFamily | None, num_layers: int, activation: str) -> ExpertConfig | None:
    """Read the experts of a config.json; None without. Raises EngineError with a one-line message."""
    if family is None or (family.enabled_by is not None and not raw.flag(family.enabled_by, default=False)):
        return None
    if family.layer_type and family.layer_type not in raw.get("layer_types"):
        return None
    key = next((name for name in COUNTS if name in raw), "num_experts")
    if family.optional and raw.get(key) == 0:
        return None
    count, each = raw.count(key, family.count or None), raw.count(family.each_field, family.each or None)
    if each > count:
        raise raw.error(f"{family.each_field} is {each}, of {count} experts")
    normalize = family.normalize
    inner = raw.count("intermediate_size" if family.inner is None else "moe_intermediate_size", family.inner or None)
    shared_inner = 0 if family.shared_inner is None else raw.count(family.shared_field, family.shared_inner)
    if family.shared_count and raw.values.get("n_shared_experts", 1):
        shared_inner = inner * raw.count("n_shared_experts", family.shared_count)
    return ExpertConfig(
        family,
        count,
        each,
        inner=inner,
        shared_inner=shared_inner,
        normalize=normalize if isinstance(normalize, bool) else raw.flag(normalize[0], default=normalize[1]),
        layers=_layers(raw, family, num_layers),
        activation="clamped_swiglu" if family.clamped else activation,
        scale=raw.number("routed_scaling_factor", family.scale),
        groups=_groups(raw, family, count, each),
        chosen_by_bias=family.sigmoid and raw.flag("use_expert_bias", default=True),
        alpha=raw.number("swiglu_alpha", 1.702) if family.clamped else 0.0,
        limit=raw.number("swiglu_limit", 7.0) if family.clamped else 0.0,
    )


def _groups(raw: JsonObject, family: ExpertFamily, count: int, each: int) -> tuple[int, int]:
    """Return the number of groups of experts, and of those from which a token's experts are chosen."""
    if not family.group_best or (family.group_best == 1 and raw.get("topk_method") != "group_limited_greedy"):
        return 1, 1
    groups, kept = (raw.count(*field) for field in zip(("n_group", "topk_group"), family.groups, strict=True))
    size, rest = divmod(count, groups)
    if rest or kept > groups or kept * size < each or (kept < groups and size < family.group_best):
        raise raw.error(f"{each} of {count} experts cannot be chosen from {kept} of {groups} groups")
    return groups, kept


def _layers(raw: JsonObject, family: ExpertFamily, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer if it has experts, as Qwen2MoeDecoderLayer decides."""
    if family.layer_type:
        return tuple(kind == family.layer_type for kind in raw.get("layer_types"))
    kinds = raw.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or not kinds.count("dense") + kinds.count("sparse") == len(kinds) == num_layers:
            raise raw.error(f"mlp_layer_types must name {num_layers} layers, each dense or sparse")
        return tuple(kind == "sparse" for kind in kinds)
    if family.dense_layers is not None:
        key, default = family.dense_layers
        first = raw.count(key, default) if raw.values.get(key, default) else 0
        return tuple(layer >= first for layer in range(num_layers))
    if not family.sparse_layers:
        return (True,) * num_layers
    step, dense = raw.count("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise raw.error("mlp_only_layers is not a list of layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
