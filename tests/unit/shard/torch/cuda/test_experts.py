"""The grouped product of a mixture of experts: the loop and the kernels against the formula in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from full_grid import full
from reference_ops import relative_error
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.kernels.expert_groups import group_by_expert
from text_generation_shard.engines.torch.kernels.experts import experts, grouped_mm, grouped_product
from text_generation_shard.engines.torch.kernels.few_experts import few_experts
from text_generation_shard.engines.torch.kernels.operands import GatedActivation, Routing
from text_generation_shard.engines.torch.kernels.routing import route
from text_generation_shard.engines.torch.layers.expert_linear import ExpertLinear, choose_top_k, experts_by_loop

ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SILU = GatedActivation("silu")


def experts_one_by_one(x: Tensor, ids: Tensor, weights: Tensor, *layer: Any) -> Tensor:  # noqa: ANN401
    few = tuple(linear.weight.contiguous().flatten(0, 1) for linear in layer[:2])
    return few_experts(x, ids.int(), weights, *layer, few)


COMPUTE = (
    experts_by_loop,
    partial(experts, product=grouped_product),
    partial(experts, product=grouped_mm),
)
GPT_OSS = GatedActivation("clamped_swiglu", interleaved=True, limit=1.5)


def formula(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertLinear, down: ExpertLinear, activation: GatedActivation
) -> Tensor:
    """Return the result in float64, one pair at a time, with the activations written out."""

    def linear(linear: ExpertLinear, expert: int, row: Tensor) -> Tensor:
        product = linear.weight[expert].double() @ row
        return product if linear.bias is None else product + linear.bias[expert].double()

    out = torch.zeros(len(x), down.weight.shape[1], dtype=torch.float64, device=x.device)
    for token, chosen in enumerate(ids.tolist()):
        for number, expert in enumerate(chosen):
            product = linear(gate_up, expert, x[token].double())
            if activation.interleaved:
                gate, up = (
                    product[::2].clamp(max=activation.limit),
                    product[1::2].clamp(-activation.limit, activation.limit),
                )
                inner = gate / (1 + torch.exp(-activation.alpha * gate)) * (up + 1)
            elif activation.kind == "relu2":
                inner = product.clamp(min=0) ** 2
            else:
                gate, up = product.tensor_split(2)
                inner = (functional.silu(gate) if activation.kind == "silu" else functional.gelu(gate)) * up
            out[token] += weights[token, number].double() * linear(down, expert, inner)
    return out


def random_case(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    *,
    bias: bool,
    transposed: bool,
    has_gate: bool = True,
) -> tuple[Tensor, Tensor, Tensor, ExpertLinear, ExpertLinear]:
    """Return operands for `shape`: tokens, k, experts, hidden, inner."""
    tokens, k, count, hidden, inner = shape

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device).to(dtype)

    def linear(outputs: int, inputs: int) -> ExpertLinear:
        weight = draw(count, inputs, outputs).transpose(1, 2) if transposed else draw(count, outputs, inputs)
        return ExpertLinear(weight * inputs**-0.5, draw(count, outputs) if bias else None)

    # The first token's experts are drawn too, the last expert has no tokens.
    ids = torch.rand(tokens, count - 1, device=device).topk(k).indices
    weights = torch.rand(tokens, k, device=device)
    return draw(tokens, hidden), ids, weights, linear((1 + has_gate) * inner, hidden), linear(hidden, inner)


CASES = [
    ((1, 2, 4, 40, 24), SILU, False, False, False),
    ((3, 2, 4, 40, 24), GPT_OSS, True, True, False),
    ((9, 2, 4, 40, 24), GatedActivation("relu2"), False, False, True),
    *(full((17, 3, 5, 72, 40), GPT_OSS, True, True, precise) for precise in (False, True)),
    *(full((90, 2, 3, 80, 48), GatedActivation("gelu"), True, False, precise) for precise in (False, True)),
    *(full((70, 8, 16, 40, 24), SILU, False, False, precise) for precise in (False, True)),
]


@pytest.mark.parametrize(("shape", "activation", "bias", "transposed", "precise"), CASES)
def test_the_weighted_sum_matches_float64(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    activation: GatedActivation,
    bias: bool,
    transposed: bool,
    precise: bool,
) -> None:
    torch.manual_seed(1)
    dtype = torch.float32 if precise else dtype
    form = {"bias": bias, "transposed": transposed, "has_gate": activation.has_gate}
    x, ids, weights, *layers = random_case(device, dtype, shape, **form)
    expected = formula(x, ids, weights, *layers, activation)
    for compute, tokens in [*((compute, len(x)) for compute in COMPUTE), (experts_one_by_one, 3)]:
        out = compute(x[:tokens], ids[:tokens], weights[:tokens], *layers, activation)
        assert out.dtype == dtype
        assert relative_error(out, expected[:tokens]) < ERRORS[dtype], compute


def test_few_experts_add_to_the_stream(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, ids, weights, gate_up, down = random_case(device, dtype, (2, 2, 4, 40, 24), bias=True, transposed=False)
    stream = 5 * torch.randn(2, 40, device=device)
    few = gate_up.weight.flatten(0, 1), down.weight.flatten(0, 1)
    expected = stream.double() + 0.5 * formula(x, ids, weights, gate_up, down, SILU)
    few_experts(x, ids.int(), weights, gate_up, down, SILU, few, out=stream, add=True, scale=0.5)
    assert relative_error(stream, expected) < ERRORS[dtype]


@pytest.mark.full
def test_a_token_does_not_depend_on_the_others(device: torch.device) -> None:
    torch.manual_seed(1)
    x, ids, weights, gate_up, down = random_case(device, torch.float32, (3, 2, 4, 32, 16), bias=False, transposed=False)
    for compute in (*COMPUTE, experts_one_by_one):
        whole = compute(x, ids, weights, gate_up, down, SILU)
        poisoned = x.clone()
        poisoned[1] = torch.nan
        found = compute(poisoned, ids, weights, gate_up, down, SILU)
        others = [0, 2]
        assert found[others].equal(whole[others])
        assert found[1].isnan().all()


@pytest.mark.parametrize("tokens", [1, 40, full(700)])
def test_pairs_are_grouped_by_expert_in_their_order(device: torch.device, tokens: int) -> None:
    """With 700 tokens the pairs are more than a program reads at a time."""
    torch.manual_seed(1)
    count, k = 11, 8
    ids = torch.rand(tokens, count, device=device)[:, : count - 1].topk(k).indices
    groups = group_by_expert(ids, count)
    assert groups.order.tolist() == ids.flatten().argsort(stable=True).tolist()
    assert groups.order[groups.rows].tolist() == list(range(ids.numel()))
    sizes = ids.flatten().bincount(minlength=count)
    assert groups.offsets.tolist() == [0, *sizes.cumsum(0).tolist()]


@pytest.mark.parametrize(("sigmoid", "best", "groups"), [(True, 2, (8, 4)), (False, 1, (5, 2)), (False, 2, (4, 1))])
def test_experts_are_chosen_from_the_best_groups(
    device: torch.device, sigmoid: bool, best: int, groups: tuple[int, int]
) -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 40).to(device)  # drawn on the CPU: with other numbers the groups might not matter
    bias = torch.randn(40).to(device) if sigmoid else None
    routing = Routing(4, True, None, bias, 1e-20, groups, best)
    ids, weights = route(logits, routing)
    expected_ids, expected = choose_top_k(logits, routing)
    assert ids.tolist() == expected_ids.tolist()
    assert torch.allclose(weights, expected, rtol=1e-6)
    assert max(len(set(row)) for row in ids.div(40 // groups[0], rounding_mode="floor").tolist()) <= groups[1]
    ungrouped, _ = choose_top_k(logits, Routing(4, True, None, bias))
    assert ungrouped.tolist() != expected_ids.tolist()


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("experts_each", "count", "normalize"), [(8, 128, True), (3, 60, False)])
def test_the_kernel_routes_as_the_formula(
    device: torch.device, experts_each: int, count: int, normalize: bool, sigmoid: bool
) -> None:
    torch.manual_seed(1)
    logits = 3 * torch.randn(5, count, device=device)
    logits[1, 7] = logits[1].amax() + 80  # one expert has all the probability
    logits[2, 5] = torch.nan
    logits[3] = torch.nan
    scale = torch.rand(count, device=device) + 0.5 if normalize else None
    bias = torch.randn(count, device=device) if sigmoid else None
    eps = 1e-20 if sigmoid else 0.0
    routing = Routing(experts_each, normalize, scale, bias, eps)
    added = torch.randn(count, device=device, dtype=torch.bfloat16)
    ids, weights = route(logits, replace(routing, bias=added))
    expected_ids, expected = choose_top_k(logits + added, routing)
    logits += added
    for row in (0, 1, 4):
        likely = expected[row] > 0  # the order of experts without any probability is not defined
        assert ids[row][likely].tolist() == expected_ids[row][likely].tolist()
        assert torch.allclose(weights[row], expected[row], rtol=1e-6, atol=1e-7)
    assert weights[2:4].isnan().all()
    assert all(0 <= expert < count for expert in ids.flatten().tolist())
    gates = torch.randn(5, 1, device=device)
    with_shared = Routing(experts_each, normalize, scale, bias, eps, has_shared=True)
    for choose in (route, choose_top_k):
        all_ids, all_weights = choose(torch.cat((logits, gates), 1), with_shared)
        assert all_ids[[0, 1, 4], :-1].equal((ids if choose is route else expected_ids)[[0, 1, 4]])
        assert all_ids[:, -1].tolist() == [count] * 5
        assert torch.allclose(all_weights[:, -1:], gates.sigmoid(), rtol=1e-6)
