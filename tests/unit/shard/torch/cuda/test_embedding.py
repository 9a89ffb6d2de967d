"""The embedding kernel, for ids from the host and for ids that only the device knows."""

from __future__ import annotations

import pytest
import torch
from full_grid import full

from text_generation_shard.engines.torch.kernels.embedding import embed


@pytest.mark.parametrize("dtype", [torch.float16, full(torch.bfloat16), full(torch.float32)])
@pytest.mark.parametrize("hidden", [full(576), full(4096), 1025, 13])
def test_each_token_gets_its_row_and_a_negative_id_the_last_token_of_the_slot(
    hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    table = torch.randn(101, hidden, device=device).to(dtype)
    ids = torch.tensor([-1, 5, -1, 0, -1], device=device, dtype=torch.int32)
    slots = torch.tensor([3, 0, 1, 2, 4], device=device, dtype=torch.int32)
    last_tokens = torch.tensor([11, 22, 33, 44, 0], device=device, dtype=torch.int32)
    buffer = torch.full((7, hidden), torch.nan, device=device)
    embed(ids, slots, last_tokens, table, buffer[:5])
    assert torch.equal(buffer[:5], table[[44, 5, 22, 0, 0]].float())
    embed(ids, slots, last_tokens, table, buffer[:5], 0.25)
    assert torch.equal(buffer[:5], table[[44, 5, 22, 0, 0]].float() * 0.25)
    assert buffer[5:].isnan().all()
