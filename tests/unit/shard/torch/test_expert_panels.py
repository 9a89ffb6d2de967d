"""The order of the codes in the panels of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.packed_weight import ExpertPanels
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import E2M1

EXPERTS, OUTPUTS, INPUTS = 2, 3, 160
MAGNITUDES = torch.tensor(E2M1[:8])


def weights() -> tuple[Tensor, Tensor]:
    """Return random codes [experts, outputs, inputs] and exponents of their groups, as E8M0 [experts, outputs, groups]."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (EXPERTS, OUTPUTS, INPUTS), generator=generator, dtype=torch.int32)
    return codes, torch.randint(100, 112, (EXPERTS, OUTPUTS, INPUTS // 32), generator=generator, dtype=torch.uint8)


def words(codes: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (codes.view(EXPERTS, OUTPUTS, -1, 8) << shifts).sum(-1, dtype=torch.int32)


def group(panels: ExpertPanels, expert: int, output: int, number: int) -> Tensor:
    """Return the 32 numbers of a group, read as `ExpertPanels` says."""
    second = number % 2
    stored = panels.codes[expert, number // 2, output].view(torch.int32)
    halves = stored >> 16 * second & 0xFFFF
    code = torch.arange(4, dtype=torch.int32)
    magnitudes = MAGNITUDES[(halves[:, None] >> 4 * code & 7).long()]
    signs = 1 - 2 * (stored[:, None] >> 8 * code + (3 if second else 7) & 1)
    scale = int(panels.scales[expert, number // 4, output])
    return (magnitudes * signs).flatten() * 2.0 ** ((scale >> 16) + (scale >> number % 4 * 4 & 15) - 133)


def test_panels_hold_the_codes_and_scales() -> None:
    codes, exponents = weights()
    panels = ExpertPanels.of(words(codes), exponents.view(torch.float8_e8m0fnu))
    assert panels is not None
    for expert in range(EXPERTS):
        for output in range(OUTPUTS):
            for number, exponent in enumerate(exponents[expert, output].tolist()):
                own = codes[expert, output, number * 32 : number * 32 + 32].long()
                expected = torch.tensor(E2M1)[own] * 2.0 ** (exponent - 127)
                assert torch.equal(group(panels, expert, output, number), expected)


def test_scales_too_far_apart_have_no_panels() -> None:
    codes, exponents = weights()
    exponents[1, 2, :2] = torch.tensor([120, 108])
    assert ExpertPanels.of(words(codes), exponents.view(torch.float8_e8m0fnu)) is None
    codes[1, 2, 32:64] = 8  # -0
    exponents[1, 2, 2:4] = 119
    assert ExpertPanels.of(words(codes), exponents.view(torch.float8_e8m0fnu)) is not None
