"""The mixtures of experts that several families have, as DeepSeek's."""

from __future__ import annotations

from dataclasses import replace

from text_generation_shard.engines.torch.models.native.expert_config import ExpertFamily

DENSE = "first_k_dense_replace"
SIGMOID_EXPERTS = ExpertFamily(
    256,
    8,
    inner=2048,
    shared_module="mlp.shared_experts",
    shared_count=1,
    shared_gate=False,
    normalize=("norm_topk_prob", True),
    dense_layers=(DENSE, 3),
    sigmoid=True,
    choice_bias="gate.e_score_correction_bias",
    eps=1e-20,
    scale=2.5,
    groups=(8, 4),
    group_best=2,
)
SOFTMAX_EXPERTS = replace(SIGMOID_EXPERTS, sigmoid=False, dense_layers=(DENSE, 0), scale=1.0, groups=(1, 1))
NEMOTRON_EXPERTS = replace(
    SIGMOID_EXPERTS,
    count=8,
    each=2,
    inner=7688,
    shared_inner=7688,
    shared_field="moe_shared_expert_intermediate_size",
    shared_module="mixer.shared_experts",
    shared_count=0,
    scale=1.0,
    groups=(1, 1),
    layer_type="moe",
    module="mixer",
    fused_module="mixer",
    fused_names=("experts.up_proj", "experts.down_proj"),
)
