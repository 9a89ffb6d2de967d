"""Fixtures of the kernel tests, which run on the GPU if there is one, else on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read while triton is imported, and at each @triton.jit


@pytest.fixture
def device() -> torch.device:
    """The device of the tensors."""
    return DEVICE


# The interpreter truncates to bfloat16, whereas the hardware rounds to nearest, so its errors are too large there.
@pytest.fixture(params=[torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype of weights, activations and the KV cache."""
    found: torch.dtype = request.param
    return found
