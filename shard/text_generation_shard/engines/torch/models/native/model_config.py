"""The config of a model that the native code computes, and of its layer that predicts the token after the next one."""

from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.layers.rope import Rope
from text_generation_shard.engines.torch.models.native.expert_config import ExpertConfig
from text_generation_shard.engines.torch.models.native.family import Family
from text_generation_shard.engines.torch.models.native.latent_config import LatentSizes
from text_generation_shard.engines.torch.models.native.prediction_names import PredictionNames
from text_generation_shard.engines.torch.models.native.state_config import Multipliers, StateConfig
from text_generation_shard.engines.torch.weights.quantization.schemes import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderNumbers:
    """The numbers of a decoder that its forward pass reads."""

    hidden_size: int
    vocab_size: int
    max_sequence_length: int
    attention_scale: float
    attention_softcap: float | None
    embedding_scale: float
    residual_scale: float
    """Factor of the outputs of attention and MLP."""
    logits_divisor: float
    final_softcap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderNumbers):
    """Shape of a decoder."""

    family: Family
    model_type: str
    dtype: str
    intermediate_size: int
    num_heads: int
    layers: tuple[LayerShape, ...]
    """The attention of each layer, with the heads of all ranks; without effect in a layer that has none."""
    activation: str
    rms_norm_eps: float
    ropes: tuple[Rope, ...]
    """The rotation of each layer."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    values_are_keys: bool
    """True: layers without a window have no projection for values, which are the keys before their norm and rotation."""
    eos_token_ids: tuple[int, ...]
    experts: ExpertConfig | None = None
    latent: LatentSizes | None = None
    states: StateConfig | None = None
    multipliers: Multipliers | None = None
    quantization: Scheme | None = None
    prediction: "PredictionConfig | None" = None
    """The layer that predicts the token after the next one, if it is loaded."""
    max_images: int = 0
    """Images that a prompt may have, as far as the model knows."""
    kept_tokens: int = 1 << 19
    """Tokens of the KV cache for which copies of weights leave memory: by default 256 sequences of 2,048."""
    image_levels: int = 1
    """The rows of an image that a token gets: its embedding, and those that are added after each of the first layers."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[LayerShape, ...]:
        """The attention of the layers that have it."""
        has = (True,) * self.num_layers if self.states is None else self.states.attention
        return tuple(compress(self.layers, has))

    def kept_bytes(self, itemsize: int) -> int | None:
        """Return the bytes of `kept_tokens` in the layers without a window; None if layers with states need memory, too."""
        if self.states is not None:
            return None
        width = sum(layer.vectors * layer.head_dim for layer in self.attention_layers if layer.window is None)
        return self.kept_tokens * width * itemsize

    @property
    def projection_weights(self) -> int:
        """Number of weights in the projections of all layers: nearly all weights but the embeddings."""
        return self._weights(0 if self.experts is None else self.experts.count)

    @property
    def active_weights(self) -> int:
        """Number of weights in the projections that one token is multiplied with."""
        return self._weights(0 if self.experts is None else self.experts.each)

    def _weights(self, experts_counted: int) -> int:
        """Return the number of weights in the projections of all layers, with some experts of those that have any."""
        attention = self.attention_layers
        mixing = sum(2 * layer.head_dim * (layer.num_heads + layer.num_kv_heads) for layer in attention)
        if self.latent is not None:
            mixing = len(attention) * self.latent.weights(self.hidden_size, self.num_heads) // self.hidden_size
        states = 0
        if self.states is not None:
            states = sum(self.states.layers) * self.states.layer_weights(self.hidden_size)
        sparse_layers, sparse, dense_layers = 0, 0, self.num_layers
        if (experts := self.experts) is not None:
            sparse_layers = sum(experts.layers)
            matrices = 2 + self.family.gated_mlp
            sparse = experts.count + matrices * (experts_counted * experts.inner + experts.shared_inner)
            dense_layers -= 0 if experts.family.beside_mlp else sparse_layers
        if self.states is not None:
            dense_layers -= self.num_layers - sum(self.states.mlps)
        mlps = sparse_layers * sparse + dense_layers * (2 + self.family.gated_mlp) * self.intermediate_size
        return self.hidden_size * (mixing + mlps) + states

    @property
    def embedding_weights(self) -> int:
        """Number of weights in the embeddings of tokens, and in the output layer unless it is the same."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionConfig:
    """A predicting layer that is loaded."""

    names: PredictionNames
    model: ModelConfig
    """The config of a model with layers of its form."""
    folder: Path
    taken_before: tuple[int, ...] = ()
    """The layers before which a draft model takes hidden states; the number of layers: after the last one. See `eagle_config`."""
    inputs: int = 0
    """Numbers of these states together. The following ones are of draft models, too."""
    draft_vocab_size: int = 0
    is_mapped: bool = False
    """True: `d2t` says which tokens it drafts; False: the first ones."""
    has_embedding: bool = False
    has_head: bool = False
    norm_before_residual: bool = False
    """True: attention is added to the normed hidden state."""

    @property
    def index(self) -> int:
        """The layer of `model` with the same form: the last one with attention."""
        states = self.model.states
        attention = (True,) * self.model.num_layers if states is None else states.attention
        return self.model.num_layers - 1 - attention[::-1].index(True)

    @property
    def rotation(self) -> tuple[Rope, int]:
        """The rotation of the layer, and the numbers of a head that it reads."""
        return self.model.ropes[self.index], self.model.layers[self.index].rotated_dim


def dequantized(model: ModelConfig) -> ModelConfig:
    """Return the same model with weights in its dtype."""
    own = model.prediction
    return replace(model, quantization=None, prediction=own and replace(own, model=dequantized(own.model)))
