"""What request bodies are made of: no coercion, sized numbers, unknown fields ignored, as in TGI (serde)."""

from __future__ import annotations

import struct
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_FLOAT32 = struct.Struct("<f")  # native "f" would turn 1e39 into infinity


def _to_float32(value: float) -> float:
    """The nearest 32-bit float, which is what TGI's rules judge: 1e-46 is 0, 0.99999999999 is 1."""
    try:
        rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    except OverflowError:
        raise ValueError("number out of range") from None
    return rounded


Float32 = Annotated[float, AfterValidator(_to_float32)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
UInt64 = Annotated[int, Field(ge=0, le=2**64 - 1)]


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)
