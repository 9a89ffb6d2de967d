"""Kernels are tested on the GPU if there is one, else in Triton's interpreter, which runs them on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read while triton is imported, and at each @triton.jit


@pytest.fixture
def device() -> torch.device:
    """Where tensors of kernel tests lie."""
    return DEVICE


# The interpreter cuts bfloat16 off where the hardware rounds to the nearest, so its errors say nothing there.
@pytest.fixture(params=[torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """What weights, activations and the KV cache are held in."""
    found: torch.dtype = request.param
    return found
