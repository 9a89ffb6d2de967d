"""Descriptions of request parameters: neutral value, range and the name in each HTTP API.

`values` describes each parameter once, where it is defined. Validation, the shard's checks, the OpenAPI document and the
conversion of request bodies are derived from these descriptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import inf
from typing import Any, TypeVar

T = TypeVar("T")


class Api(StrEnum):
    """The HTTP APIs. Each has its own parameter names."""

    TGI = "tgi"
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "anthropic"


@dataclass(frozen=True, slots=True)
class Range:
    """An interval of numbers. NaN is outside every range."""

    minimum: float
    maximum: float = inf
    exclusive: bool = False
    """Exclude both ends."""

    def __contains__(self, value: float) -> bool:
        if self.exclusive:
            return self.minimum < value < self.maximum
        return self.minimum <= value <= self.maximum

    @property
    def rule(self) -> str:
        """TGI's words for the range."""
        if self.maximum == inf:
            return "must be strictly positive" if self.exclusive or self.minimum > 0 else f"must be >= {self.minimum}"
        if self.exclusive:
            return f"must be > {self.minimum} and < {self.maximum}"
        return f"must be >= {self.minimum} and <= {self.maximum}"

    @property
    def json_schema(self) -> dict[str, int]:
        """The range as keywords of JSON schema."""
        names = ("exclusiveMinimum", "exclusiveMaximum") if self.exclusive else ("minimum", "maximum")
        ends = zip(names, (self.minimum, self.maximum), strict=True)
        return {name: int(end) for name, end in ends if end != inf}


@dataclass(frozen=True, slots=True)
class Parameter:
    field: str
    """The name in `values` and on the wire."""
    neutral: Any
    """The value of a request that does not ask for it; always allowed."""
    range: Range | None
    """Allowed values other than the neutral one; None: any."""
    names: Mapping[Api, str]
    """The name in the request bodies of each API that has it."""
    samples: bool
    """True if it shapes the draw of a token: TGI samples if it is set, OpenAI ignores it at temperature 0."""
    open: Range | None
    """Allowed values in the APIs of OpenAI and Anthropic; those outside of `range` have a meaning of their own there."""

    def allows(self, value: float) -> bool:
        """Return True if `value` is neutral or in range."""
        return value == self.neutral or self.range is None or value in self.range

    def allowed(self, api: Api) -> Range | None:
        """Return the allowed values in an API; None: any."""
        return self.range if api is Api.TGI or self.open is None else self.open

    def label(self, api: Api) -> str:
        """Return the name as messages to clients of `api` write it."""
        name = self.names.get(api) or next(iter(self.names.values()))
        return name if "`" in name else f"`{name}`"


def parameter(
    neutral: T, values: Range | None = None, *, samples: bool = False, open: Range | None = None, **names: str
) -> T:
    """Define a dataclass field that is a request parameter.

    `names` has the keys tgi, chat, completions, responses and anthropic; `openai` stands for the middle three.
    """
    if (openai := names.pop("openai", None)) is not None:
        names = {"chat": openai, "completions": openai, "responses": openai} | names
    by_api = {Api(api): name for api, name in names.items()}
    metadata = {"range": values, "names": by_api, "samples": samples, "open": open}
    defined: T = field(default=neutral, metadata=metadata)
    return defined


def parameters_of(values: type) -> tuple[Parameter, ...]:
    """Return the parameters that the dataclass `values` defines, in the order of its fields."""
    return tuple(
        Parameter(defined.name, defined.default, **defined.metadata)
        for defined in fields(values)
        if "names" in defined.metadata
    )
