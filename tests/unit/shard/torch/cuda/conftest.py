"""Fixtures of the kernel tests, which run on the GPU if there is one, else on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read while triton is imported, and at each @triton.jit


@pytest.fixture(autouse=True)
def computed_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run loops with computed bounds.

    That of Triton 3.6 converts a bound, an array of one element, to an integer, which NumPy 2.4 allows only for zero-dimensional
    arrays. The patch is harmless with versions that have fixed this.
    """
    if DEVICE.type != "cpu":
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


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
