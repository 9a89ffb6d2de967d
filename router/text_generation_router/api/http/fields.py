"""Types of the fields of bodies. As in TGI (serde), numbers have a size."""

import struct
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Annotated, Any

import numpy as np
import orjson
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetPydanticSchema,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

WrittenNumber = Annotated[orjson.Fragment, GetPydanticSchema(lambda _, schema_of: schema_of(float))]
"""A number, already written as JSON."""
WrittenLogprob = Annotated[orjson.Fragment, GetPydanticSchema(lambda _, schema_of: schema_of(float | None))]
"""A log-probability, already written as JSON; null if unknown."""
WrittenJson = Annotated[orjson.Fragment, GetPydanticSchema(lambda _, schema_of: schema_of(Any))]
"""Any value, already written as JSON."""


_FLOAT32 = struct.Struct("<f")  # native "f" would turn 1e39 into infinity


def _to_float32(value: float) -> float:
    """The nearest 32-bit float. TGI's rules apply to it: 1e-46 is 0, 0.99999999999 is 1."""
    try:
        rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    except OverflowError:
        raise ValueError("must be a number of 32 bits") from None
    return rounded


def _as_integers(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return 2.0 as 2, as JSON Schema has it, also in a list. An integer that orjson cannot write stays a number."""
    if isinstance(value, list):
        return [*map(_as_integers, value)] if float in map(type, value) else value
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


WHOLE = BeforeValidator(_as_integers)
"""For an integer, or for a list of them: a call for each of half a million would take too long."""
Float32 = Annotated[float, AfterValidator(_to_float32)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]
UInt32 = Annotated[int, Field(ge=0, lt=2**32), WHOLE]
UInt64 = Annotated[int, Field(ge=0, le=2**64 - 1), WHOLE]

MAX_NAME = 256
"""Characters of a name, an id or another word of a client."""
MAX_MODEL_BYTES = 256
"""Bytes of the name of a model as JSON: every chunk of a stream repeats it."""
MAX_STOP_CHARACTERS = 1024
"""Characters of a stop string: each new token is compared with it."""
MAX_STOPS = 1024
"""Stop strings that are read; `--max-stop-sequences` limits those that are used."""
MAX_METADATA_CHARACTERS = 512
"""OpenAI's limit for a value of `metadata`."""


def _short_as_json(name: str) -> str:
    if len(orjson.dumps(name)) - len('""') > MAX_MODEL_BYTES:
        raise ValueError(f"must have at most {MAX_MODEL_BYTES} bytes")
    return name


Name = Annotated[str, Field(max_length=MAX_NAME)]
ModelName = Annotated[Name, AfterValidator(_short_as_json)]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]

# Validation of a list stops at its first invalid entry, so that a list of half a million is refused as fast as a short
# one.
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(fail_fast=True), WHOLE]

_MANY = 64
"""Fewer ids are validated as fast one by one."""


def _packed(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:  # noqa: ANN401 - any JSON value
    """Return token ids as an array. Many valid ones take a tenth of the time in which each is validated."""
    if isinstance(value, list) and len(value) >= _MANY:
        with suppress(TypeError, OverflowError):
            ids = array("I", value)
            # An array takes true and false for 1 and 0.
            if bool not in map(type, compress(value, (np.asarray(ids) < 2).tobytes())):
                return ids
    return array("I", validate(value))


PromptTokenIds = Annotated[
    Sequence[int], GetPydanticSchema(lambda _, schema_of: schema_of(TokenIds)), WrapValidator(_packed)
]
"""Token ids as an array, of any number: pydantic does not apply limits of the length to it."""

MAX_METADATA = 16
"""OpenAI's limit for the keys of `metadata`."""


def at_most(limit: int, what: str) -> Callable[[Any], Any]:
    """A validator that refuses an object of more than `limit` keys before any key is validated.

    Pydantic has no FailFast for objects.
    """

    def counted(value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"must have at most {limit} {what}")
        return value

    return counted


_FEW = BeforeValidator(at_most(MAX_METADATA, "keys"))
TextMetadata = Annotated[dict[Name, Annotated[str, Field(max_length=MAX_METADATA_CHARACTERS)]], _FEW]
AnyMetadata = Annotated[dict[Name, Any], _FEW]
