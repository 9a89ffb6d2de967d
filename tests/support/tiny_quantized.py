"""A tiny checkpoint in the format of AWQ, packed code by code. The libraries of all formats made tests/corpus/quantized."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tiny_checkpoint import PROJECTIONS
from torch import Tensor

GROUP = 32
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight outputs."""
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "GEMM"}


def packed(values: np.ndarray) -> Tensor:
    """Pack codes of 4 bits [outputs, n] into words [n, outputs / 8]."""
    words = np.zeros((values.shape[1], len(values) // 8), dtype=np.uint32)
    for output, codes in enumerate(values):
        words[:, output // 8] |= codes.astype(np.uint32) << np.uint32(4 * PLACES[output % 8])
    return torch.from_numpy(words.view(np.int32).copy())


def quantized_model(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return the quantization config, the stored tensors and the dequantized ones of a model with random projections."""
    stored, dense = dict(tensors), dict(tensors)
    torch.manual_seed(11)
    for key in [key for key in tensors if key.split(".")[-2] in PROJECTIONS and key.endswith(".weight")]:
        outputs, inputs = stored.pop(key).shape
        codes = torch.randint(0, 16, (outputs, inputs)).numpy()
        zeros = torch.randint(1, 16, (outputs, inputs // GROUP)).numpy()
        scales = (torch.rand(outputs, inputs // GROUP) * 0.05 + 0.02).half()
        for name, tensor in ("qweight", packed(codes)), ("qzeros", packed(zeros)), ("scales", scales.t().contiguous()):
            stored[key.removesuffix("weight") + name] = tensor
        groups = np.arange(inputs) // GROUP
        dense[key] = (torch.from_numpy(codes - zeros[:, groups]).half() * scales[:, groups]).float()
    return CONFIG, stored, dense
