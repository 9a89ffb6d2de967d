"""What request bodies are made of: no coercion, sized numbers, unknown fields ignored, as in TGI (serde)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from typing_extensions import TypeAliasType

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

# Every list of every body stops at its first wrong entry: half a million of them are refused as fast as one. As aliases,
# because pydantic's marker cannot stand in a union.
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
TokenIds = TypeAliasType("TokenIds", Annotated[list[UInt32], FailFast()])
TokenIdLists = TypeAliasType("TokenIdLists", Annotated[list[TokenIds], FailFast()])

MAX_METADATA = 16
"""OpenAI's own limit of `metadata`'s keys."""


def at_most(limit: int, what: str) -> Callable[[Any], Any]:
    """Refuses an object of more than `limit` keys before one of them is looked at: pydantic has no FailFast for these."""

    def counted(value: Any) -> Any:  # noqa: ANN401 - whatever the body has
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"at most {limit} {what}")
        return value

    return counted


TextMetadata = TypeAliasType("TextMetadata", Annotated[dict[str, str], BeforeValidator(at_most(MAX_METADATA, "keys"))])
AnyMetadata = TypeAliasType("AnyMetadata", Annotated[dict[str, Any], BeforeValidator(at_most(MAX_METADATA, "keys"))])


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)
