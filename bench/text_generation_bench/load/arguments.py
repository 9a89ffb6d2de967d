"""Types of flags: their texts to values, with the reason why one is invalid."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any


def numbers(kind: type[int] | type[float]) -> Any:  # noqa: ANN401 - argparse's type
    """The type of numbers above 0 with commas in between."""

    def parse(text: str) -> list[float]:
        values = [kind(part) for part in text.split(",")]
        if not all(0 < value < math.inf for value in values):
            raise argparse.ArgumentTypeError(f"{text}: must be above 0 and finite")
        return values

    parse.__name__ = "number"
    return parse


def above(least: float, kind: type[int] | type[float] = int) -> Any:  # noqa: ANN401 - argparse's type
    """The type of a number that is `least` or more."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least:g}")
        return value

    parse.__name__ = "number"
    return parse


def milliseconds(text: str) -> float:
    """The type of a time in ms."""
    return float(above(1e-3, float)(text))


def body(text: str) -> dict[str, Any]:
    """The type of a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def header(text: str) -> str:
    """The type of a header line."""
    if ":" not in text or any(ord(letter) < 32 or ord(letter) > 126 for letter in text):
        raise argparse.ArgumentTypeError("must be 'Name: value'")
    return text
