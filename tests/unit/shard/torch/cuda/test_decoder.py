"""The kernels that a step of the decoder launches, in order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference_kernels import ALONE, ReferenceKernels
from tiny_checkpoint import load_for_cuda, random_tensors, write_checkpoint

from text_generation_shard.engines.torch.attention.device_step import DeviceStep, StepContext
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.layers.device_ops import DeviceOps
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.decoder import Decoder

FUSED = ["matvec", "rotate_and_append", "decode_attention", "matvec", "matvec", "matvec"]
SEPARATE = ["rotate_and_append", "decode_attention", "rms_norm", "activate", "rms_norm"]


class RecordingKernels:
    """The reference kernels; records the names of those that are called."""

    def __init__(self, scale: float) -> None:
        self._kernels = ReferenceKernels(scale)
        self.launched: list[str] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(self._kernels, name)
        if not callable(found):
            return found

        def record(*args: object, **options: object) -> object:
            self.launched.append(name)
            return found(*args, **options)

        return record


@pytest.mark.parametrize(
    ("tokens", "kernels"),
    [(1, ["embed", *FUSED, *FUSED, "rms_norm"]), (2, ["embed", "rms_norm", *SEPARATE, *SEPARATE])],
    ids=["fused", "separate"],
)
def test_a_step_launches_no_more_kernels_than_needed(tmp_path: Path, tokens: int, kernels: list[str]) -> None:
    folder = write_checkpoint(tmp_path, random_tensors())
    config, weights = read_model_config(folder), load_for_cuda(folder, torch.device("cpu"), torch.float32)
    recording = RecordingKernels(config.attention_scale)
    decoder = Decoder(config, weights, DeviceOps(recording, ALONE, torch.float32), ALONE)
    cache = [torch.zeros(tokens, 2, each.num_kv_heads, BLOCK_SIZE, each.head_dim) for each in config.layers]
    slots = torch.arange(tokens, dtype=torch.int32)
    tables, numbers = [slots.unsqueeze(1)] * len(cache), torch.zeros(3, tokens, dtype=torch.int32)
    context = StepContext(recording, cache, config.layers, tables, *numbers)
    columns = torch.stack((torch.full_like(slots, 5), torch.zeros_like(slots), slots, torch.zeros_like(slots)))
    decoder.forward(DeviceStep(columns, tokens, context))
    assert recording.launched == kernels
