"""Tiny checkpoints in the formats of GPTQ, AWQ, compressed-tensors, FP8 blocks and ModelOpt, packed code by code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tiny_checkpoint import PROJECTIONS
from torch import Tensor

GROUP = 32
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight outputs."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8 = torch.float8_e4m3fn
Packed = tuple[dict[str, Tensor], Tensor]
"""The stored tensors of a projection by suffix, and its weight."""


def words(codes: np.ndarray) -> Tensor:
    """Pack [n, m] codes of 4 bits into [n, m / 8] words."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for column in range(codes.shape[1]):
        packed[:, column // 8] |= codes[:, column].astype(np.uint32) << np.uint32(4 * (column % 8))
    return torch.from_numpy(packed.view(np.int32).copy())


def draw(outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Return codes [outputs, inputs], zero points and scales [outputs, groups]."""
    groups = inputs // GROUP
    codes = torch.randint(0, 16, (outputs, inputs)).numpy()
    zeros = torch.randint(1, 16, (outputs, groups)).numpy()
    return codes, zeros, (torch.rand(outputs, groups) * 0.05 + 0.02).half()


def product(codes: np.ndarray, zeros: np.ndarray, scales: Tensor, groups: np.ndarray) -> Tensor:
    return torch.from_numpy(codes - zeros[:, groups]).half() * scales[:, groups]


def gptq(outputs: int, inputs: int) -> Packed:
    codes, zeros, scales = draw(outputs, inputs)
    order = torch.randperm(inputs).numpy()
    groups = (np.arange(inputs) // GROUP)[order]
    tensors = {
        "qweight": words(codes).t().contiguous(),
        "qzeros": words(zeros.T - 1),
        "scales": scales.t().contiguous(),
        "g_idx": torch.from_numpy(groups).int(),
    }
    return tensors, product(codes, zeros, scales, groups)


def awq(outputs: int, inputs: int) -> Packed:
    codes, zeros, scales = draw(outputs, inputs)

    def interleaved(values: np.ndarray) -> Tensor:
        shuffled = values.T.reshape(values.shape[1], -1, 8)
        places = np.zeros_like(shuffled)
        for output, place in enumerate(AWQ_PLACES):
            places[..., place] = shuffled[..., output]
        return words(places.reshape(values.shape[1], -1))

    tensors = {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": scales.t().contiguous()}
    return tensors, product(codes, zeros, scales, np.arange(inputs) // GROUP)


def pack_quantized(outputs: int, inputs: int) -> Packed:
    codes, zeros, scales = draw(outputs, inputs)
    tensors = {
        "weight_packed": words(codes),
        "weight_scale": scales,
        "weight_zero_point": words(zeros.T).t().contiguous(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    return tensors, product(codes, zeros, scales, np.arange(inputs) // GROUP)


def fp8_block(outputs: int, inputs: int) -> Packed:
    weight = torch.randn(outputs, inputs).to(FP8)
    scale = torch.rand(-(-outputs // 48), -(-inputs // 48)) * 0.5 + 0.1
    dense = weight.float()
    for row in range(outputs):
        for column in range(inputs):
            dense[row, column] *= scale[row // 48, column // 48]
    return {"weight": weight, "weight_scale_inv": scale}, dense


def nvfp4(outputs: int, inputs: int) -> Packed:
    codes = torch.randint(0, 16, (outputs, inputs)).numpy()
    scale, whole = (torch.rand(outputs, inputs // 16) * 200 + 20).to(FP8), torch.tensor(0.0017)
    values = np.array([*E2M1, *(-value for value in E2M1)], dtype=np.float32)[codes]
    factors = (scale.float() * whole).numpy()[:, np.arange(inputs) // 16]
    packed = torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}, torch.from_numpy(values * factors)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[int, int], Packed]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "GEMM"}, awq),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
            "ignore": ["lm_head"],
        },
        pack_quantized,
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [48, 48], "activation_scheme": "dynamic"}, fp8_block),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, nvfp4),
}


def quantized_model(
    name: str, tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return the quantization config, the stored tensors and the dequantized ones of a model with random projections."""
    config, pack = FORMATS[name]
    stored, dense = dict(tensors), dict(tensors)
    torch.manual_seed(11)
    for key in [key for key in tensors if key.split(".")[-2] in PROJECTIONS and key.endswith(".weight")]:
        packed, weight = pack(*tensors[key].shape)
        del stored[key]
        stored |= {key.removesuffix("weight") + suffix: tensor for suffix, tensor in packed.items()}
        dense[key] = weight.float()
    return config, stored, dense
