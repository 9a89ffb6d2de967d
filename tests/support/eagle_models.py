"""Draft models of the form of EAGLE-3 with random weights, and what they draft, in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_transformers import random_model, save
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

HEADS, KV_HEADS, HEAD_DIM, INNER, TOKENS, EPS = 4, 2, 8, 56, 64, 1e-5


class EagleModel:
    """A model of a config, and a draft model for it in the format of the authors or that of the library speculators.

    The second one has another hidden size than the model, an embedding of its own, and norms its residual. Without `own_head`
    the draft model has the LM head of the model.
    """

    def __init__(self, config: PretrainedConfig, *, speculators: bool = False, own_head: bool = True) -> None:
        config._attn_implementation = "sdpa"
        self.model = random_model(config)
        target, self.speculators, self.own_head = config.hidden_size, speculators, own_head
        width = self.width = 32 if speculators else target
        self.taken = [0, 1, 3] if speculators else [1, 2, 3]
        torch.manual_seed(12)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape) * 0.2

        attention = {"q": (HEADS, 2 * width), "k": (KV_HEADS, 2 * width), "v": (KV_HEADS, 2 * width)}
        self.layer = {f"self_attn.{name}_proj": draw(n * HEAD_DIM, inputs) for name, (n, inputs) in attention.items()}
        self.layer |= {"self_attn.o_proj": draw(width, HEADS * HEAD_DIM), "mlp.down_proj": draw(width, INNER)}
        self.layer |= {f"mlp.{name}_proj": draw(INNER, width) for name in ("gate", "up")}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.layer |= {name: 1 + draw(width) for name in norms}
        self.others = {"fc": draw(width, 3 * target), "norm": 1 + draw(width), "lm_head": draw(TOKENS, width)}
        self.tokens = torch.arange(TOKENS) * 5 + 3
        embedding = self.model.get_input_embeddings().weight.detach()
        self.embedding = draw(len(embedding), width) if speculators else embedding
        if not own_head:
            self.others["lm_head"] = self.model.get_output_embeddings().weight.detach()
            self.tokens = torch.arange(len(embedding))

    def write(self, folder: Path) -> Path:
        """Write the checkpoints, the draft model into `draft`."""
        save(self.model, folder)
        (draft := folder / "draft").mkdir()
        prefix = "layers.0." if self.speculators else "midlayer."
        tensors = {f"{prefix}{name}.weight": each for name, each in self.layer.items()}
        tensors |= {f"{name}.weight": each for name, each in self.others.items() if name != "lm_head" or self.own_head}
        if self.own_head:
            tensors["d2t"] = self.tokens - torch.arange(TOKENS)
        layer: dict[str, Any] = {"model_type": "llama", "hidden_size": self.width, "intermediate_size": INNER}
        layer |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
        layer |= {"vocab_size": len(self.embedding), "max_position_embeddings": 512, "rms_norm_eps": EPS}
        layer |= {"num_hidden_layers": 1}
        if self.speculators:
            tensors["embed_tokens.weight"] = self.embedding
            config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
            config |= {"architectures": ["Eagle3Speculator"], "eagle_aux_hidden_state_layer_ids": self.taken}
            config["target_hidden_size"] = self.model.config.hidden_size
        else:
            config = layer | {"architectures": ["LlamaForCausalLMEagle3"]}
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in self.taken]}
        save_file(tensors, draft / "model.safetensors")
        config["draft_vocab_size"] = TOKENS if self.own_head else None
        (draft / "config.json").write_text(json.dumps(config))
        return folder

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> tuple[list[int], Tensor]:
        """Return the drafts of tokens after some, and the logits [count, vocabulary] that give them."""
        inputs: list[Tensor] = [self.model.get_input_embeddings()(torch.tensor(tokens[:-1]))]
        hooks = [
            layer.register_forward_hook(
                lambda *each: inputs.append(
                    (each[2][0] if isinstance(each[2], tuple) else each[2]).view(len(tokens) - 1, -1)
                )
            )
            for layer in self.model.model.layers
        ]
        self.model.model(torch.tensor([tokens[:-1]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        hidden = torch.cat([inputs[each] for each in self.taken], dim=1) @ self.others["fc"].T
        following, logits = tokens[1:], []
        for _ in range(count):
            output = self._layer(self.embedding[following], hidden)[-1:]
            logits.append(_normed(output, self.others["norm"])[0] @ self.others["lm_head"].T)
            hidden, following = torch.cat((hidden, output)), [*following, int(self.tokens[logits[-1].argmax()])]
        return following[len(tokens) - 1 :], torch.stack(logits)

    def _layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        own, count = self.layer, len(hidden)
        normed = _normed(hidden, own["hidden_norm"])
        joint = torch.cat((_normed(embedded, own["input_layernorm"]), normed), dim=1)
        queries, keys, values = (
            (joint @ own[f"self_attn.{name}_proj"].T).view(count, -1, HEAD_DIM).transpose(0, 1) for name in "qkv"
        )
        attended = functional.scaled_dot_product_attention(
            _rotated(queries), _rotated(keys), values, is_causal=True, enable_gqa=True
        )
        residual = (normed if self.speculators else hidden) + attended.transpose(0, 1).reshape(count, -1) @ own[
            "self_attn.o_proj"
        ].T
        x = _normed(residual, own["post_attention_layernorm"])
        gate, up = x @ own["mlp.gate_proj"].T, x @ own["mlp.up_proj"].T
        return residual + (functional.silu(gate) * up) @ own["mlp.down_proj"].T


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def _rotated(heads: Tensor) -> Tensor:
    """Return heads [heads, tokens, HEAD_DIM] rotated by their positions: (x, y) of dimensions i and i + half."""
    half = HEAD_DIM // 2
    angles = torch.arange(heads.shape[1]).unsqueeze(1) * 10_000.0 ** (-torch.arange(half) / half)
    x, y = heads.split(half, dim=-1)
    return torch.cat((x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin()), dim=-1)
