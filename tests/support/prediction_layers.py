"""Checkpoints with a layer that predicts the token after the next one, and what it predicts, computed by transformers' layers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_transformers import random_model, save
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

NAMES = {
    "mtp": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "nextn": tuple(f"model.layers.{{n}}.{name}" for name in ("", "enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "mimo": tuple(
        f"model.mtp_layers.0.{name}"
        for name in ("", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ),
}
"""Prefix of the layer; names of the norms of embedding and hidden state, of the projection, and of the last norm."""
LAYOUTS = {"deepseek_v3": "nextn", "glm4_moe": "nextn", "qwen2": "mimo"}
"""The layouts of the models of a config; `mtp` of others."""


class PredictionLayer:
    """A model of a config, and a layer of another one as the predicting layer of it."""

    def __init__(self, config: PretrainedConfig) -> None:
        config._attn_implementation = "sdpa"
        self.model, donor = random_model(config), random_model(config)
        torch.manual_seed(11)
        with torch.no_grad():
            for weight in donor.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.1)
        self.donor, self.eps, width = donor, config.rms_norm_eps, config.hidden_size
        self.layout = LAYOUTS.get(config.model_type, "mtp")
        # Layer 1 of the hybrids has attention; the last one of the others has experts, if there are any.
        self.layer = 1 if self.layout == "mtp" else config.num_hidden_layers - 1
        self.norms = [torch.randn(width) * 0.3 for _ in range(3)]
        """The norms of embedding and hidden state, and the last one; less 1 in the models whose norms are so."""
        self.projection = torch.randn(width, 2 * width) * 0.2

    def write(self, folder: Path) -> Path:
        """Write the checkpoint."""
        own = folder / "donor"
        own.mkdir()
        save(self.donor, own)
        prefix, taken = f"model.layers.{self.layer}.", load_file(own / "model.safetensors")
        count = self.model.config.num_hidden_layers
        to, *names = (name.format(n=count) for name in NAMES[self.layout])
        tensors = {name.replace(prefix, to): each for name, each in taken.items() if name.startswith(prefix)}
        first, second, projection, last = (f"{name}.weight" for name in names)
        stored = self.norms if self.layout == "mtp" else [1.0 + each for each in self.norms]
        tensors |= dict(zip((first, second, last), stored, strict=True))
        save(self.model, folder)
        save_file(tensors | {projection: self.projection}, folder / "predictions.safetensors")
        if self.layout == "mimo":
            path = folder / "config.json"
            changed = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
            path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        return folder

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> tuple[list[int], Tensor]:
        """Return the drafts of tokens after some, and the logits [count, vocabulary] that give them."""
        hidden = self.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
        following, logits = tokens[1:], []
        for _ in range(count):
            embedded = self.model.get_input_embeddings()(torch.tensor([following]))
            inputs = [self._normed(embedded, 0), self._normed(hidden, 1)]
            states = functional.linear(
                torch.cat(inputs[::-1] if self.layout == "mimo" else inputs, dim=-1), self.projection
            )
            positions = torch.arange(len(following)).unsqueeze(0)
            inner = self.donor.model
            rotary = inner.rotary_emb(states, positions)
            output = inner.layers[self.layer](
                states, position_embeddings=rotary, attention_mask=None, position_ids=positions
            )
            output = output[0] if isinstance(output, tuple) else output
            normed = self._normed(output, 2)[:, -1:]
            logits.append(self.model.lm_head(normed)[0, 0])
            hidden, following = torch.cat((hidden, normed), dim=1), [*following, int(logits[-1].argmax())]
        return following[len(tokens) - 1 :], torch.stack(logits)

    def _normed(self, x: Tensor, index: int) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], 1.0 + self.norms[index], self.eps)
