"""The routers of mixtures of experts choose and weigh as transformers' modules do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from transformers import Gemma4TextConfig, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from text_generation_shard.engines.torch.layers.expert_linear import Routed, softmax_top_k

HIDDEN, EXPERTS, K, TOKENS = 24, 16, 3, 200
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": K}
LOCAL = SIZES | {"num_local_experts": EXPERTS}
OWN = SIZES | {"num_experts": EXPERTS}


def logits(router: Module, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None))


def gemma4(router: Module, x: Tensor) -> Routed:
    weight = router.scale * HIDDEN**-0.5
    scores = router.proj(torch.nn.functional.rms_norm(x, (HIDDEN,), weight, router.eps))
    return softmax_top_k(scores, K, normalize=True, expert_scale=router.per_expert_scale)


def softmax(*, normalize: bool) -> Callable[[Module, Tensor], Routed]:
    return lambda router, x: softmax_top_k(logits(router, x), K, normalize=normalize)


CASES: dict[str, tuple[Module, Callable[[Module, Tensor], Routed]]] = {
    "mixtral": (MixtralTopKRouter(MixtralConfig(**LOCAL)), softmax(normalize=True)),
    "qwen2_moe": (Qwen2MoeTopKRouter(Qwen2MoeConfig(**OWN, norm_topk_prob=False)), softmax(normalize=False)),
    "qwen3_moe": (Qwen3MoeTopKRouter(Qwen3MoeConfig(**OWN, norm_topk_prob=True)), softmax(normalize=True)),
    "olmoe": (OlmoeTopKRouter(OlmoeConfig(**OWN, norm_topk_prob=False)), softmax(normalize=False)),
    "gpt_oss": (GptOssTopKRouter(GptOssConfig(**LOCAL)), softmax(normalize=True)),
    "gemma4": (Gemma4TextRouter(Gemma4TextConfig(hidden_size=HIDDEN, num_experts=EXPERTS, top_k_experts=K)), gemma4),
}


def by_id(ids: Tensor, weights: Tensor) -> Routed:
    """Return both in the order of the ids: the modules do not sort."""
    order = ids.argsort(-1)
    return ids.gather(-1, order), weights.gather(-1, order)


@pytest.mark.parametrize("name", CASES)
def test_the_choice_and_the_weights_are_those_of_transformers(name: str) -> None:
    router, ours = CASES[name]
    torch.manual_seed(3)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_(1.0 if tensor.ndim == 1 else 0.0, 0.5)
    x = torch.randn(TOKENS, HIDDEN)
    with torch.inference_mode():
        _, weights, ids = router(x)
        expected_ids, expected = by_id(ids, weights)
        found_ids, found = by_id(*ours(router, x))
    assert found_ids.equal(expected_ids)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)
