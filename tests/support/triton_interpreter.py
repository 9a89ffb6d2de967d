"""A patch for Triton's interpreter, so that it runs loops with computed bounds.

The interpreter of Triton 3.6 converts a bound, an array of one element, to an integer, which NumPy 2.4 allows only for
zero-dimensional arrays. The patch is harmless with versions that have fixed this.
"""

from __future__ import annotations

import pytest
from triton.runtime import interpreter


def allow_computed_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply the patch until `monkeypatch` is undone."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
