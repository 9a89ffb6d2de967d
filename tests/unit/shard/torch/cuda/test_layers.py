"""The weights of a model, whole and divided among ranks: the results are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import CONFIG, random_tensors, write_checkpoint
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.cuda.layers import ModelWeights
from text_generation_shard.engines.torch.cuda.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.model_config import read_model_config
from text_generation_shard.engines.torch.weights import fill_dummy, load_weights

BIASED = {"attention_bias": True, "mlp_bias": True}


def load(folder: Path, tp: TensorParallelRank, device: torch.device) -> ModelWeights:
    weights = ModelWeights(read_model_config(folder), tp, device, torch.float32)
    load_weights(folder, weights.named_parameters())
    weights.process_weights_after_loading()
    return weights


def close(ours: Tensor, reference: Tensor) -> bool:
    return torch.allclose(ours.cpu(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, BIASED, {"tie_word_embeddings": True}], ids=["plain", "biased", "tied"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_together_compute_the_same_as_one(
    tmp_path: Path, device: torch.device, changes: dict[str, Any], size: int
) -> None:
    """Compare with the checkpoint's tensors. With more than two ranks, several ranks hold the same KV head."""
    tensors = random_tensors(changes)
    ranks = [
        load(write_checkpoint(tmp_path, tensors, changes), TensorParallelRank(rank, size), device).layers
        for rank in range(size)
    ]
    hidden, queries, inner = (torch.randn(3, width) for width in (64, 128, 96))

    def reference(name: str, x: Tensor) -> Tensor:
        name = f"model.layers.1.{name}"
        return torch.nn.functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def parts(x: Tensor) -> list[Tensor]:
        return [part.contiguous().to(device) for part in x.chunk(size, dim=1)]

    query, key, value = (reference(f"self_attn.{name}_proj", hidden) for name in "qkv")
    gate, up = (reference(f"mlp.{name}_proj", hidden) for name in ("gate", "up"))
    for rank, layers in enumerate(ranks):
        layer = layers[1]
        kv = slice(rank * 32 // size // 16 * 16, None)
        kv_width = max(32 // size, 16)
        expected = [query.chunk(size, 1)[rank], key[:, kv][:, :kv_width], value[:, kv][:, :kv_width]]
        assert close(layer.qkv(hidden.to(device)), torch.cat(expected, 1))
        assert close(
            layer.gate_up(hidden.to(device)), torch.cat([gate.chunk(size, 1)[rank], up.chunk(size, 1)[rank]], 1)
        )
        assert torch.equal(layer.mlp_norm.cpu(), tensors["model.layers.1.post_attention_layernorm.weight"])
    outputs = [layers[1].output(part) for layers, part in zip(ranks, parts(queries), strict=True)]
    assert close(sum(outputs, torch.zeros(())), reference("self_attn.o_proj", queries))
    outputs = [layers[1].down(part) for layers, part in zip(ranks, parts(inner), strict=True)]
    assert close(sum(outputs, torch.zeros(())), reference("mlp.down_proj", inner))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("size", "vocab_size"), [(1, 331), (2, 331), (4, 331), (4, 5)])
def test_the_vocabulary_is_divided_and_padded(
    tmp_path: Path, device: torch.device, tied: bool, size: int, vocab_size: int
) -> None:
    changes = {"tie_word_embeddings": tied, "vocab_size": vocab_size}
    tensors = random_tensors(changes)
    write_checkpoint(tmp_path, tensors, changes)
    ranks = [load(tmp_path, TensorParallelRank(rank, size), device) for rank in range(size)]
    x = torch.randn(3, 64)
    logits = [weights.head.logits(x.to(device)).cpu() for weights in ranks]
    assert len({part.shape for part in logits}) == 1
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if tied else tensors["lm_head.weight"]
    assert close(torch.cat(logits, 1)[:, :vocab_size], x @ head.t())
    assert torch.cat(logits, 1)[:, vocab_size:].eq(0).all()
    for weights in ranks:
        assert torch.equal(weights.embedding.cpu(), embedding)


def test_every_tensor_of_a_checkpoint_is_a_parameter(tmp_path: Path, device: torch.device) -> None:
    tensors = random_tensors(BIASED)
    weights = load(write_checkpoint(tmp_path, tensors, BIASED), TensorParallelRank(), device)
    assert set(weights.named_parameters()) == set(tensors)


def test_query_and_key_norms_are_on_every_rank(tmp_path: Path, device: torch.device) -> None:
    tensors = random_tensors()
    for index in range(2):
        for name in ("q_norm", "k_norm"):
            tensors[f"model.layers.{index}.self_attn.{name}.weight"] = torch.randn(16)
    weights = load(write_checkpoint(tmp_path, tensors, {"model_type": "qwen3"}), TensorParallelRank(1, 2), device)
    head_norms = weights.layers[1].head_norms
    assert head_norms is not None
    for norm, name in zip(head_norms, ("q_norm", "k_norm"), strict=True):
        assert torch.equal(norm.cpu(), tensors[f"model.layers.1.self_attn.{name}.weight"])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "size", "words"),
    [
        (9, 3, 96, 2, "9 attention heads cannot be divided among 2 shards"),
        (8, 2, 98, 4, "98 inner values of the MLP cannot be divided among 4 shards"),
        (12, 4, 96, 6, "4 key-value heads cannot be divided among 6 shards"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(
    tmp_path: Path, heads: int, kv_heads: int, inner: int, size: int, words: str
) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner}
    config = read_model_config(write_checkpoint(tmp_path, {}, changes))
    with pytest.raises(EngineError, match=words):
        ModelWeights(config, TensorParallelRank(0, size), torch.device("cpu"), torch.float32)


def test_heads_per_rank(tmp_path: Path) -> None:
    config = read_model_config(write_checkpoint(tmp_path, {}))
    heads = {}
    for size in (1, 2, 4):
        weights = ModelWeights(config, TensorParallelRank(size - 1, size), torch.device("cpu"), torch.float32)
        heads[size] = (weights.num_heads, weights.num_kv_heads)
    assert heads == {1: (8, 2), 2: (4, 1), 4: (2, 1)}


def test_dummy_weights_do_not_depend_on_the_number_of_ranks(tmp_path: Path, device: torch.device) -> None:
    config = read_model_config(write_checkpoint(tmp_path, {}))
    alone, *ranks = (
        ModelWeights(config, tp, device, torch.float32)
        for tp in (TensorParallelRank(), TensorParallelRank(0, 2), TensorParallelRank(1, 2))
    )
    for weights in (alone, *ranks):
        fill_dummy(weights.named_parameters())
    queries, _, values = alone.layers[0].qkv.weight.split([128, 32, 32])
    for rank, weights in enumerate(ranks):
        mine = weights.layers[0].qkv.weight
        assert torch.equal(mine[:64], queries.chunk(2)[rank])
        assert torch.equal(mine[-16:], values.chunk(2)[rank])
    down = torch.cat([weights.layers[1].down.weight for weights in ranks], 1)
    assert torch.equal(down, alone.layers[1].down.weight)
    head = torch.cat([weights.head.weight for weights in ranks])[: CONFIG["vocab_size"]]
    assert torch.equal(head, alone.head.weight)
