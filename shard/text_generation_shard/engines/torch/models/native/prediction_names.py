"""The layer that predicts the token after the next one: its form, and its names in a checkpoint.

A checkpoint may have such a layer beside those of the model (multi-token prediction, DeepSeek-AI 2024, arXiv 2412.19437). At a position it
reads the embedding e of the next token and the output h of the model, each normed:

    x = layer(projection · [e, h])        logits = head · norm(x)
"""

from dataclasses import dataclass


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
