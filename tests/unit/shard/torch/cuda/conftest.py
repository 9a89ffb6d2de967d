"""Fixtures of the kernel tests, which run on the GPU if there is one, else on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import os
from types import FunctionType

import pytest
import torch

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read while triton is imported, and at each @triton.jit


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run loops with computed bounds, and prepare its language once for a launch.

    That of Triton 3.6 converts a bound, an array of one element, to an integer, which NumPy 2.4 allows only for zero-dimensional
    arrays. And it replaces the functions of the language anew for each call of one kernel function by another, which takes
    half of the time. The patches are harmless with versions that have fixed this.
    """
    if DEVICE.type != "cpu":
        return
    from triton import language as tl
    from triton.runtime import interpreter

    original_tensor, original = interpreter._patch_lang_tensor, interpreter._patch_lang
    prepared: set[bool] = set()

    def patch_tensor(tensor: type, scope: interpreter._LangPatchScope) -> None:
        original_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch(function: FunctionType) -> interpreter._LangPatchScope:
        is_inner = function.__globals__.get("core") is tl.core  # one that Triton itself brings

        def restore() -> None:
            restore_all()
            prepared.clear()

        if is_inner in prepared:
            return interpreter._LangPatchScope()
        prepared.add(is_inner)
        scope = original(function)
        restore_all, scope.restore = scope.restore, restore
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
    monkeypatch.setattr(interpreter, "_patch_lang", patch)


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
