"""Errors of request bodies that cannot be read. On TGI's routes their texts are those of TGI's web framework.

The error for a JSON value that is not a valid body names the field, and the value that the field must have.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from text_generation_router.error_attributes import TgiBody
from text_generation_router.errors import ClientError, InvalidRequest


class BodyRejected(ClientError):
    """The body of a request cannot be read."""

    tgi_body = TgiBody.TEXT


class InvalidJson(BodyRejected):
    """The body is not valid JSON."""

    status = 400
    error_type = "invalid_json"


class UnsupportedTransferCoding(BodyRejected):
    """The body is transferred in a coding other than chunked."""

    status = 400
    error_type = "unsupported_transfer_coding"
    message = "Failed to buffer the request body: of `Transfer-Encoding` only chunked is supported"
    closes_connection = True


class BodyTooLarge(BodyRejected):
    """The body is larger than the limit."""

    status = 413
    error_type = "payload_too_large"
    prefix = "Failed to buffer the request body: length limit exceeded. The limit of this server, --payload-limit, is "
    message = "32000000 bytes"
    anthropic_type = "request_too_large"
    closes_connection = True  # the client may still be sending


class BodyTimeout(BodyRejected):
    """The body arrives too slowly."""

    status = 408
    error_type = "request_timeout"
    message = "Failed to buffer the request body: it arrives too slowly"
    closes_connection = True


class UnsupportedMediaType(BodyRejected):
    """The content type of the body is not JSON."""

    status = 415
    error_type = "unsupported_media_type"
    message = "Expected request with `Content-Type: application/json`"


class InvalidBody(BodyRejected):
    """The body does not match the schema of the route."""

    status = 422
    error_type = "invalid_body"
    openai_code = "invalid_value"
    tgi_prefix = "Failed to deserialize the JSON body into the target type: "


Place = tuple[int | str, ...]
"""The place of an error: keys, indices and names of members of unions."""

MAX_STEP = 64
"""Characters of a key in an error's path: the client chose it."""
MAX_GIVEN = 32
"""Characters of a value in an error."""
_TYPES = {
    "bool_type": "a boolean", "dict_type": "an object", "float_type": "a number", "int_from_float": "an integer",
    "int_type": "an integer", "list_type": "an array", "model_attributes_type": "an object", "model_type": "an object",
    "string_type": "a string",
}  # fmt: skip
_JSON_TYPES = {
    bool: "a boolean", dict: "an object", float: "a number", int: "an integer", list: "an array", str: "a string",
}  # fmt: skip
_RULES = {
    "greater_than_equal": ("must be >= {ge}", "integer_below_min_value"),
    "less_than_equal": ("must be <= {le}", "integer_above_max_value"),
    "less_than": ("must be < {lt}", "integer_above_max_value"),
    "literal_error": ("must be {expected}", "invalid_value"),
    "none_required": ("must be null", "invalid_type"),
    "string_too_long": ("must have at most {max_length} characters", "string_above_max_length"),
    "string_too_short": ("cannot be empty", "string_below_min_length"),
    "too_long": ("must have at most {max_length} entries", "array_above_max_length"),
    "too_short": ("cannot be empty", "empty_array"),
    "value_error": ("{error}", "invalid_value"),
}
"""Text and OpenAI's code of each kind of error but wrong types."""
_MISFITS = {*_TYPES, "literal_error", "missing"}
"""Kinds of errors of a variant that may not be the one that was meant."""


def invalid_body(error: ValidationError, value: object) -> InvalidBody:
    """Return the first error of a value. For a field of a union type: of the variants that fit best.

    There are at most as many errors as the body has fields, because validation of a list stops at its first invalid entry.
    """
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]["loc"][:1]
    placed = [(*_place(each, value), each) for each in errors if each["loc"][:1] == first]
    path, given, deepest = max(placed, key=_fit)
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:MAX_STEP]}" for step in path).removeprefix(".")
    if deepest["type"] == "missing":
        return InvalidBody(f"missing field `{name}`", param=name, code="missing_required_parameter")
    field = f"`{name}`" if name else "the body"
    same = [each for where, _, each in placed if where == path]
    other = next((each for each in same if each["type"] not in _TYPES), None)
    if other is None:
        types = dict.fromkeys(_TYPES[each["type"]] for each in same)
        text = f"must be {' or '.join(types)}. Given: {_JSON_TYPES.get(type(given), 'null')}"
        return InvalidBody(f"{field} {text}", param=name or None, code="invalid_type")
    rule, code = _RULES.get(other["type"], (other["msg"], "unsupported_parameter"))
    text = rule.format_map(other.get("ctx", {})).replace("'", "`")
    if given != "" and isinstance(given, str | float | int) and other["type"] != "value_error":
        text += f". Given: {str(given)[:MAX_GIVEN]!r}" if isinstance(given, str) else f". Given: {json.dumps(given)}"
    return InvalidBody(f"{field} {text}", param=name or None, code=code)


def _fit(placed: tuple[Place, object, ErrorDetails]) -> tuple[bool, int, list[int]]:
    """Return a measure of how much of the value fitted before the error."""
    path, _, detail = placed
    return detail["type"] not in _MISFITS, len(path), [step for step in path if isinstance(step, int)]


def _place(detail: ErrorDetails, value: Any) -> tuple[Place, object]:  # noqa: ANN401 - any JSON value
    """Return the keys and indices of an error's place, without the names of members of unions, and the value there."""
    path: list[int | str] = []
    for step in detail["loc"]:
        if (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int)):
            path.append(step)
            value = value[step]  # type: ignore[index]
    return ((*path, detail["loc"][-1]) if detail["type"] == "missing" else tuple(path)), value


@contextmanager
def about(param: str | None) -> Iterator[None]:
    """Let the errors inside of the block be about this field, if one is given and they name no other."""
    try:
        yield
    except InvalidRequest as error:
        error.param = error.param or param
        raise
