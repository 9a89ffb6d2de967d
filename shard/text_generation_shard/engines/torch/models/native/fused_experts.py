"""The experts of checkpoints that have those of a layer in one tensor."""

from dataclasses import replace
from pathlib import Path

from text_generation_shard.engines.torch.models.native.expert_config import ExpertConfig
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint
from text_generation_shard.engines.torch.weights.quantization.schemes import Scheme

FUSED_EXPERTS = "experts.gate_up_proj"
"""The end of the name of the gate and up projections of all experts of a layer."""


def without_fused_experts(folder: Path, scheme: Scheme | None) -> Scheme | None:
    """Return the scheme without experts if a checkpoint has those of a layer in one tensor that is not quantized.

    Such a tensor is not a linear layer, so that the config does not name it among those that are not quantized.
    """
    if scheme is None or scheme.online or not any(folder.glob("*.safetensors")):
        return scheme
    fused = any(name.endswith(FUSED_EXPERTS) for name in Checkpoint(folder, text_only=True).names)
    return replace(scheme, ignored=(*scheme.ignored, "*.experts.*")) if fused else scheme


def in_their_layout(folder: Path, experts: ExpertConfig | None, hidden_size: int) -> ExpertConfig | None:
    """Return the experts with the layout of their tensors in a checkpoint, if the family has two: Qwen3-VL and transformers differ."""
    if experts is None or not experts.family.may_transpose or not any(folder.glob("*.safetensors")):
        return experts
    checkpoint = Checkpoint(folder, text_only=True)
    down = next((name for name in checkpoint.names if name.endswith(experts.family.fused_names[1])), None)
    return replace(experts, transposed=down is not None and checkpoint.map([down])[down].shape[-1] == hidden_size)
