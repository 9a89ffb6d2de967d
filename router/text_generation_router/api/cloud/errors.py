"""Errors of the routes of cloud platforms only."""

from __future__ import annotations

from text_generation_router.error_attributes import Operation
from text_generation_router.errors import InvalidRequest


class NotUtf8(InvalidRequest):
    """An input is not UTF-8 text."""

    error_type = "utf8"
    prefix = ""
    operations = Operation.INFER


class LengthMismatch(InvalidRequest):
    """The numbers of inputs and outputs differ."""

    error_type = "length mismatch"
    prefix = ""
    message = "Inputs and outputs length mismatch"
    operations = Operation.INFER


class NoInstances(InvalidRequest):
    """The request has no instances."""

    error_type = "Input validation error"
    message = "`instances` cannot be empty"
    operations = Operation.PREDICT
