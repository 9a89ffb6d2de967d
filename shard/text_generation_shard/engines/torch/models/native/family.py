"""A family of decoders: its differences from Llama, with the defaults of its config class in transformers, which a config.json may omit."""

from dataclasses import dataclass
from typing import Literal

from text_generation_shard.engines.torch.models.native.expert_config import ExpertFamily
from text_generation_shard.engines.torch.models.native.latent_config import LatentSizes
from text_generation_shard.engines.torch.models.native.prediction_names import PredictionNames
from text_generation_shard.engines.torch.models.native.state_config import StateFamily

Flag = bool | tuple[str, bool]
"""A fixed switch, or a field of config.json with its default."""
ATTENTION_BIAS = ("attention_bias", False)
MLP_BIAS = ("mlp_bias", False)


MANY_IMAGES = 64
"""Images of a prompt, if the model itself sets no limit."""


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names of the norms of a layer in a checkpoint."""

    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of the other modules of a layer in a checkpoint, and of the last norm."""

    attention: str = "self_attn"
    attention_output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    last_norm: str = "model.norm"
    embedding: str = "model.embed_tokens"


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model of text and images, of which the text part is served."""

    architecture: str
    text_type: str
    """Default model_type of the text part; `…_text` has a class of its own, which transformers takes whatever the part says."""
    ties: bool = False
    """Default of tie_word_embeddings."""
    max_images: int = MANY_IMAGES
    """Images that a prompt may have; 0: text alone is served."""
    is_flat: bool = False
    """True: older checkpoints have the text part's config in that of the whole model."""
    bidirectional_images: Literal["none", "all layers", "layers with a window"] = "none"
    """The layers in which a token of an image attends to later ones of it; the last ones if use_bidirectional_attention is "vision"."""


@dataclass(frozen=True, slots=True)
class Family:
    """The switches of a model_type, and the defaults of the fields that config.json may omit."""

    architecture: str
    """The architecture of this type that generates text."""
    vocab_size: int | None = None
    num_heads: int | None = None
    max_positions: int | None = None
    """Defaults of sizes, where checkpoints omit them; None: config.json must have them."""
    intermediate_size: int | None = None
    """The default, where no layer has a dense MLP."""
    intermediate_field: str = "intermediate_size"
    """The size of the dense MLPs."""
    adjusts_intermediate: bool = False
    """True: two thirds of the size, rounded up, if block_auto_adjust_ff_dim says so."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """None: num_attention_heads."""
    full_head_dim: int | None = None
    """Default of global_head_dim, of the layers without a window; None: all layers have the same heads."""
    activation: str = "silu"
    activation_field: str = "hidden_act"
    gated_mlp: bool = True
    """False: MLPs are down(act(up(x)))."""
    gelu_by_tanh: bool = False
    """True: the activation `gelu` means its approximation by tanh, as in the first checkpoints of Gemma."""
    rms_norm_eps: float = 1e-6
    eps_field: str = "rms_norm_eps"
    tie_word_embeddings: bool = False
    qkv_bias: Flag = False
    output_bias: Flag = False
    mlp_bias: Flag = False
    query_key_norm: Flag = False
    joint_query_key_norm: bool = False
    """True: all query heads are normed together, and all key heads."""
    value_norm: bool = False
    """True: each value head is normed too, without a weight."""
    layer_scalars: bool = False
    """True: the residual stream is multiplied by a number after each layer."""
    zero_centered_norms: bool = False
    """True: a norm multiplies by 1 + weight."""
    norms: NormNames = NormNames()
    norms_after_attention: bool = False
    """True: layers with attention norm the outputs of attention and MLP, and not their inputs; others the inputs alone."""
    names: TensorNames = TensorNames()
    fused_qkv: bool = False
    """True: a checkpoint has one tensor for query, key and value."""
    fused_gate_up: bool = False
    rope_theta: float = 10_000.0
    rope: tuple[tuple[str, str | float], ...] = ()
    """Default of rope_parameters, without rope_theta."""
    local_rope_theta: float | None = None
    """The rope_theta of layers with a window; None: that of the other layers."""
    partial_rotary: float | None = None
    """Default of partial_rotary_factor, the part of a head that is rotated; None: heads are rotated whole."""
    interleaved_rotary: bool = False
    """True: dimensions 2i and 2i + 1 are rotated together, not i and i + half of the head."""
    rotary_sections: tuple[int, int, int] | None = None
    """Default of mrope_section, the number of rotated pairs of each axis of the positions of images; None: they have one axis."""
    alternating_axes: bool = False
    """True: the pairs of the axes alternate, while the axis has any left; False: those of an axis follow one another."""
    rope_switch: bool = False
    """True: layers have a rotation only if position_embedding_type is "rope"."""
    no_rope_interval: int = 0
    """Default of no_rope_layer_interval: every n-th layer has no rotation; 0: all layers have one."""
    windows: Literal[
        "none",
        "all layers",
        "use_sliding_window",
        "use_sliding_window, all layers",
        "use_sliding_window, every second layer",
        "use_sliding_window, layers without rotation",
        "layer_types",
        "layer_types, none in the last layer",
    ] = "none"
    """The layers with a window: see `config._windows`."""
    window: int | None = None
    """Default of sliding_window."""
    window_pattern: int = 1
    """Without layer_types, every layer has a window but each n-th, if n > 1."""
    attention_scale: Literal["head_dim", "query_pre_attn_scalar", "attention_multiplier", "one"] = "head_dim"
    """The field that scales the products of query and key: the first two by the inverse of its square root."""
    attention_softcap: float | None = None
    """Default of attn_logit_softcapping; None: the family does not cap."""
    final_softcap: float | None = None
    """Default of final_logit_softcapping."""
    scales_embedding: bool = False
    """True: embeddings are multiplied by √hidden_size."""
    gated_attention: bool = False
    """True: the query projection has a gate for each query value, which the output of attention is multiplied with."""
    sinks: bool = False
    """True: the softmax of attention counts one more score per head, without a value."""
    experts: ExpertFamily | None = None
    latent: LatentSizes | None = None
    """The sizes of multi-head latent attention; None: layers have another attention."""
    states: StateFamily | None = None
    """The layers with a state; None: all layers have attention."""
    multipliers: bool = False
    """True: the config has embedding_multiplier, residual_multiplier and logits_scaling."""
    depth_multipliers: bool = False
    """True: the config has scale_emb, scale_depth and dim_model_base, from which these follow (MiniCPM 3)."""
    layer_multipliers: bool = False
    """True: the config has a factor for each projection of a layer, and lm_head_multiplier (Falcon-H1)."""
    prediction: PredictionNames | None = None
    """The layer that checkpoints may have to predict the token after the next one; None: it is not known."""
    older_fields: tuple[tuple[str, str], ...] = ()
    """Older or other names of fields, which go before the usual ones, as in transformers."""
    unsupported: tuple[tuple[str, int], ...] = ()
    """Fields with their defaults; models in which one is not 0 are computed by transformers."""
