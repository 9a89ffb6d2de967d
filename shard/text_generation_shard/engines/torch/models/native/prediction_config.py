"""The layer that predicts the token after the next one: its place in a checkpoint, its form, and how it is found.

A checkpoint may have such a layer beside those of the model (multi-token prediction, DeepSeek-AI 2024, arXiv 2412.19437). At a position it
reads the embedding e of the next token and the output h of the model, each normed:

    x = layer(projection · [e, h])        logits = head · norm(x)
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from text_generation_shard.engines.torch.layers.rope import Rope

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.models.native.config import ModelConfig


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """The names of the tensors of a predicting layer, each after `root`."""

    root: str
    """{layers} stands for num_hidden_layers."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layer: str = ""
    """The prefix of the tensors that it has in common with the layers of the model."""
    hidden_first: bool = False
    """True: the projection reads [h, e]."""


MTP = PredictionNames("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", layer="layers.0.")
"""The layers of Qwen3-Next and Qwen3.5."""
NEXTN = PredictionNames("model.layers.{layers}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
"""The layers of DeepSeek V3 and GLM-4.5. Their own embedding and head are copies of those of the model."""
MIMO = PredictionNames(
    "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True
)
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields with the number of such layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionConfig:
    """A predicting layer that is loaded."""

    names: PredictionNames
    model: "ModelConfig"
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


def dequantized(model: "ModelConfig") -> "ModelConfig":
    """Return the same model with weights in its dtype."""
    own = model.prediction
    return replace(model, quantization=None, prediction=own and replace(own, model=dequantized(own.model)))
