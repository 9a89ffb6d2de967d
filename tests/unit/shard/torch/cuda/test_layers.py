"""The weights of a model, whole and divided among ranks: the results are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import load_for_cuda, random_tensors, write_checkpoint
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.parameters import empty_weights
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank

BIASED = {"attention_bias": True, "mlp_bias": True}


def close(ours: Tensor, reference: Tensor) -> bool:
    return torch.allclose(ours.cpu(), reference, rtol=1e-4, atol=1e-4)


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with one for query, key and value, and one for gate and up."""
    tensors = dict(tensors)
    for index in range(2):
        for whole, parts in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
            block = f"model.layers.{index}.{whole.split('.')[0]}"
            rows = [tensors.pop(f"{block}.{name}_proj.weight") for name in parts]
            tensors[f"model.layers.{index}.{whole}_proj.weight"] = torch.cat(rows)
    return tensors


@pytest.mark.parametrize(
    "changes",
    [{}, BIASED, {"model_type": "qwen3"}, {"model_type": "phi3"}],
    ids=["plain", "biased", "head norms", "fused"],
)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_together_compute_the_same_as_one(
    tmp_path: Path, device: torch.device, changes: dict[str, Any], size: int
) -> None:
    """Compare with the checkpoint's tensors. With more than two ranks, several ranks hold the same KV head."""
    tensors = random_tensors(changes)
    head_norms = [f"model.layers.{index}.self_attn.{name}_norm.weight" for index in range(2) for name in "qk"]
    if changes.get("model_type") == "qwen3":
        tensors |= {name: torch.randn(16) for name in head_norms}
    write_checkpoint(tmp_path, fused(tensors) if changes.get("model_type") == "phi3" else tensors, changes)
    ranks = [load_for_cuda(tmp_path, device, torch.float32, TensorParallelRank(rank, size)) for rank in range(size)]
    hidden, queries, inner = (torch.randn(3, width) for width in (64, 128, 96))

    def reference(name: str, x: Tensor) -> Tensor:
        name = f"model.layers.1.{name}"
        return torch.nn.functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def parts(x: Tensor) -> list[Tensor]:
        return [part.contiguous().to(device) for part in x.chunk(size, dim=1)]

    query, key, value = (reference(f"self_attn.{name}_proj", hidden) for name in "qkv")
    gate, up = (reference(f"mlp.{name}_proj", hidden) for name in ("gate", "up"))
    for rank, weights in enumerate(ranks):
        layer = weights.layers[1]
        assert (layer.attention.shape.num_heads, layer.attention.shape.num_kv_heads) == (8 // size, max(1, 2 // size))
        kv = slice(rank * 32 // size // 16 * 16, None)
        kv_width = max(32 // size, 16)
        expected = [query.chunk(size, 1)[rank], key[:, kv][:, :kv_width], value[:, kv][:, :kv_width]]
        assert close(layer.attention.qkv(hidden.to(device)), torch.cat(expected, 1))
        assert close(
            layer.mlp.gate_up(hidden.to(device)), torch.cat([gate.chunk(size, 1)[rank], up.chunk(size, 1)[rank]], 1)
        )
        assert torch.equal(layer.mlp_norm.weight.cpu(), tensors["model.layers.1.post_attention_layernorm.weight"])
        norms = (
            [norm.weight.cpu().tolist() for norm in (layer.attention.head_norms.query, layer.attention.head_norms.key)]
            if layer.attention.head_norms
            else []
        )
        assert norms == [tensors[name].tolist() for name in head_norms[2:] if name in tensors]
    outputs = [weights.layers[1].attention.output(part) for weights, part in zip(ranks, parts(queries), strict=True)]
    assert close(sum(outputs, torch.zeros(())), reference("self_attn.o_proj", queries))
    outputs = [weights.layers[1].mlp.down(part) for weights, part in zip(ranks, parts(inner), strict=True)]
    assert close(sum(outputs, torch.zeros(())), reference("mlp.down_proj", inner))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("size", "vocab_size"), [(1, 331), (2, 331), (4, 331), (4, 5)])
def test_the_vocabulary_is_divided_and_padded(
    tmp_path: Path, device: torch.device, tied: bool, size: int, vocab_size: int
) -> None:
    changes = {"tie_word_embeddings": tied, "vocab_size": vocab_size}
    tensors = random_tensors(changes)
    write_checkpoint(tmp_path, tensors, changes)
    ranks = [load_for_cuda(tmp_path, device, torch.float32, TensorParallelRank(rank, size)) for rank in range(size)]
    x = torch.randn(3, 64)
    logits = [weights.head(x.to(device)).cpu() for weights in ranks]
    assert len({part.shape for part in logits}) == 1
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if tied else tensors["lm_head.weight"]
    assert close(torch.cat(logits, 1)[:, :vocab_size], x @ head.t())
    assert torch.cat(logits, 1)[:, vocab_size:].eq(0).all()
    for weights in ranks:
        assert torch.equal(weights.embedding.cpu(), embedding)


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "9 attention heads cannot be divided among 2"),
        ({"intermediate_size": 98}, 4, "98 inner values of the MLP cannot be divided among 4 shards"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "4 key-value heads cannot be divided among 6"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(
    tmp_path: Path, changes: dict[str, int], size: int, words: str
) -> None:
    config = read_model_config(write_checkpoint(tmp_path, {}, changes))
    with pytest.raises(EngineError, match=words):
        empty_weights(config, TensorParallelRank(0, size), torch.device("cpu"), torch.float32, on_cpu=False)
