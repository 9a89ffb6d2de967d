"""Triton's interpreter, made to run loops whose bounds a kernel has computed.

It turns a bound, an array of one number, into an integer in a way that NumPy took from 2.4 on only for arrays without a
dimension (Triton 3.6; harmless where it is mended).
"""

from __future__ import annotations

import pytest
from triton.runtime import interpreter


def allow_computed_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until `monkeypatch` is undone."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
