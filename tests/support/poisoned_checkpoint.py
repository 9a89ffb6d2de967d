"""A checkpoint of a tiny Llama with one token that gives NaN logits."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

POISON = 199
"""A token whose embedding is NaN."""


def write_poisoned_checkpoint(folder: Path) -> Path:
    """Write the checkpoint, the same each time; return its folder."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=200,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=600,
            initializer_range=0.3,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
    model.save_pretrained(folder)
    return folder
