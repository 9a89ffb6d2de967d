"""Checkpoints with a layer that predicts the token after the next one, and what it predicts, computed by transformers' layers."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_transformers import random_model, save
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

LAYER = 1
"""A layer with attention in the tiny configs."""


class PredictionLayer:
    """A model of a config, and a layer of another one as `mtp.layers.0` of it."""

    def __init__(self, config: PretrainedConfig) -> None:
        config._attn_implementation = "sdpa"
        self.model, donor = random_model(config), random_model(config)
        torch.manual_seed(11)
        with torch.no_grad():
            for weight in donor.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.1)
        self.donor, self.eps, width = donor, config.rms_norm_eps, config.hidden_size
        self.norms = {
            name: torch.randn(width) * 0.3 for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        }
        self.projection = torch.randn(width, 2 * width) * 0.2

    def write(self, folder: Path) -> Path:
        """Write the checkpoint."""
        own = folder / "donor"
        own.mkdir()
        save(self.donor, own)
        prefix = f"model.layers.{LAYER}."
        tensors = {
            name.replace(prefix, "mtp.layers.0."): each
            for name, each in load_file(own / "model.safetensors").items()
            if name.startswith(prefix)
        }
        tensors |= {f"mtp.{name}.weight": each for name, each in self.norms.items()}
        save(self.model, folder)
        save_file(tensors | {"mtp.fc.weight": self.projection}, folder / "mtp.safetensors")
        return folder

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> tuple[list[int], Tensor]:
        """Return the drafts of tokens after some, and the logits [count, vocabulary] that give them."""
        hidden = self.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
        following, logits = tokens[1:], []
        for _ in range(count):
            embedded = self.model.get_input_embeddings()(torch.tensor([following]))
            inputs = self._normed(embedded, "pre_fc_norm_embedding"), self._normed(hidden, "pre_fc_norm_hidden")
            states = functional.linear(torch.cat(inputs, dim=-1), self.projection)
            positions = torch.arange(len(following)).unsqueeze(0)
            inner = self.donor.model
            rotary = inner.rotary_emb(states, positions)
            output = inner.layers[LAYER](
                states, position_embeddings=rotary, attention_mask=None, position_ids=positions
            )
            output = output[0] if isinstance(output, tuple) else output
            normed = self._normed(output, "norm")[:, -1:]
            logits.append(self.model.lm_head(normed)[0, 0])
            hidden, following = torch.cat((hidden, normed), dim=1), [*following, int(logits[-1].argmax())]
        return following[len(tokens) - 1 :], torch.stack(logits)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], 1.0 + self.norms[name], self.eps)
