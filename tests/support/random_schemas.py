"""Random JSON schemas like those that clients send."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Json = dict[str, Any]

PATTERNS = (
    r"^\d{3}-\d{4}$", r"^[A-Z]{2,4}$", r"^[a-z0-9]+(?:-[a-z0-9]+)*$", r"^#[0-9a-f]{6}$", r"[aeiou]", r"^v\d+\.\d+$",
)  # fmt: skip
FORMATS = (
    "date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "hostname", "duration", "int32", "phone",
    *(() if version("llguidance").startswith("0.") else ("uri",)),  # older ones do not know it
)  # fmt: skip
NAMES = ("id", "name", "kind", "oneOf", "items", "$ref", "créé", "a b", 'quo"te', "properties", "value", "tags", "end")


class Schemas:
    """Random schemas like those that clients send: nothing recursive, nothing that is not enforced."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: Json = {}

    def draw(self) -> Json:
        schema = self._object(0)
        if self._definitions:
            schema["$defs"] = self._definitions
        if self._random.random() < 0.3:
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return schema

    def _any(self, depth: int) -> Json:
        leaves: list[Callable[[], Json]] = [
            self._string, self._string, self._number, self._enum, self._const, lambda: {"type": "boolean"},
            lambda: {"type": "null"}, self._types,
        ]  # fmt: skip
        inner = [self._object, self._array, self._any_of, self._reference, self._one_of, self._map, self._all_of]
        if depth < 3 and self._random.random() < 0.5:
            schema = self._random.choice(inner)(depth + 1)
        else:
            schema = self._random.choice(leaves)()
        if self._random.random() < 0.3:
            schema |= {"title": "Title", "description": 'What it is: "quoted".'}
        return schema

    def _string(self) -> Json:
        schema: Json = {"type": "string"}
        match self._random.randrange(5):
            case 0:
                schema["pattern"] = self._random.choice(PATTERNS)
            case 1:
                schema["format"] = self._random.choice(FORMATS)
            case 2:
                schema["minLength"] = self._random.randint(0, 5)
                schema["maxLength"] = self._random.randint(5, 50)
            case 3:
                schema["default"] = "x"
        return schema

    def _number(self) -> Json:
        schema: Json = {"type": self._random.choice(["integer", "number"])}
        low = self._random.choice([-1000, -7, 0, 1, 18, 0.5])
        match self._random.randrange(5):
            case 0:
                schema |= {"minimum": low, "maximum": low + self._random.choice([1, 10, 99.5, 10_000])}
            case 1:
                schema["exclusiveMinimum"] = low
            case 2:
                schema["maximum"] = low
            case 3:
                schema["multipleOf"] = self._random.choice([1, 2, 5, 10])
        return schema

    def _enum(self) -> Json:
        values = [
            "red", "green", 'sa"y', "é", "", 1, 2.5, None, True, {"a": [1]}, "line\nbreak", "tab\t", "back\\slash",
        ]  # fmt: skip
        chosen = self._random.sample(values, self._random.randint(1, 6))
        strings = [value for value in chosen if isinstance(value, str)]
        return {"type": "string", "enum": strings} if strings and self._random.random() < 0.7 else {"enum": chosen}

    def _const(self) -> Json:
        return {"const": self._random.choice(["on", 3, None, False, -0.5, [1, "a"], {"k": "v"}, "\u0001"])}

    def _types(self) -> Json:
        return {"type": self._random.sample(["string", "integer", "null", "boolean"], 2)}

    def _object(self, depth: int) -> Json:
        names = self._random.sample(NAMES, self._random.randint(0 if depth else 1, 5))
        schema: Json = {"type": "object", "properties": {name: self._any(depth + 1) for name in names}}
        schema["required"] = [name for name in names if self._random.random() < 0.7]
        if self._random.random() < 0.7:
            schema["additionalProperties"] = False
        return schema

    def _map(self, depth: int) -> Json:
        if self._random.random() < 0.3:
            return {
                "type": "object",
                "patternProperties": {"^x_[a-z]+$": self._any(depth + 1)},
                "additionalProperties": False,
            }
        schema: Json = {"type": "object", "additionalProperties": self._any(depth + 1)}
        return schema | ({"minProperties": 1} if self._random.random() < 0.3 else {})

    def _array(self, depth: int) -> Json:
        if self._random.random() < 0.2:
            return {"type": "array", "prefixItems": [self._any(depth + 1), self._any(depth + 1)], "items": False}
        schema: Json = {"type": "array", "items": self._any(depth + 1)}
        if self._random.random() < 0.6:
            schema |= {"minItems": self._random.randint(0, 2), "maxItems": self._random.randint(2, 5)}
        return schema

    def _any_of(self, depth: int) -> Json:
        if self._random.random() < 0.6:
            return {"anyOf": [self._any(depth + 1), {"type": "null"}]}
        return {"anyOf": [self._any(depth + 1) for _ in range(self._random.randint(2, 4))]}

    def _one_of(self, depth: int) -> Json:
        def branch(kind: str) -> Json:
            inner = self._object(depth + 1)
            inner["properties"] = {"type": {"const": kind}} | inner["properties"]
            return inner | {"required": ["type", *inner["required"]]}

        return {"oneOf": [branch(kind) for kind in ("cat", "dog", "fish")[: self._random.randint(2, 3)]]}

    def _all_of(self, depth: int) -> Json:
        names = self._random.sample(NAMES, 2)
        parts = [{"type": "object", "properties": {name: self._any(depth + 2)}, "required": [name]} for name in names]
        return {"allOf": parts}

    def _reference(self, depth: int) -> Json:
        name = f"Model{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._object(depth + 1) if self._random.random() < 0.7 else self._enum()
        return {"$ref": f"#/$defs/{name}"}
