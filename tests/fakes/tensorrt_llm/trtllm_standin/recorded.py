"""Classes and signatures built from signatures-*.json, the tables that record those of a release."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal, Mapping, Optional, Union  # noqa: UP035 - names in recorded annotations

from pydantic import BaseModel, ConfigDict, Field, create_model

TABLES = Path(__file__).resolve().parent
OPAQUE = "Fields are not recorded: none can be set."


def _names(enum: str, *members: str) -> StrEnum:
    return StrEnum(enum, {member: member for member in members})  # type: ignore[return-value]


ENUMS: dict[str, Any] = {
    "CapacitySchedulerPolicy": _names(
        "CapacitySchedulerPolicy", "MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"
    ),
    "ContextChunkingPolicy": _names("ContextChunkingPolicy", "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"),
    "BatchingType": _names("BatchingType", "STATIC", "INFLIGHT"),
    # auto is the TorchSampler, except with beam search (docs/source/features/sampling.md).
    "SamplerType": _names("SamplerType", "TRTLLMSampler", "TorchSampler", "auto"),
    "LoadFormat": Enum("LoadFormat", {"AUTO": 0, "DUMMY": 1, "VISION_ONLY": 2}),
    "WaitingQueuePolicy": StrEnum("WaitingQueuePolicy", {"FCFS": "fcfs", "PRIORITY": "priority"}),
    "PrefillCudaGraphBackend": StrEnum("PrefillCudaGraphBackend", {"DISABLED": "disabled"}),
    "LogprobMode": Enum("LogprobMode", {"RAW": "raw", "PROCESSED": "processed"}),
}
globals().update(ENUMS)  # pickle finds them by name


class StrictBaseModel(BaseModel):
    """A model that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class _Names(dict[str, Any]):
    """The names in annotations; unknown ones are Any."""

    def __missing__(self, name: str) -> Any:  # noqa: ANN401 - a type
        return Any


class Recorded:
    """The table of one release, and the classes built from it."""

    def __init__(self, version: str) -> None:
        self.entries: dict[str, Any] = json.loads((TABLES / f"signatures-{version}.json").read_text())["entries"]
        builtin = {kind.__name__: kind for kind in (int, float, str, bool, bytes, dict, list, object)}
        typing = {"Optional": Optional, "Union": Union, "List": list, "Dict": dict, "Mapping": Mapping}
        self.classes = _Names(builtin | typing | ENUMS | {"Literal": Literal, "Path": Path, "BaseModel": BaseModel})

    def build(self, name: str, base: type | None = None) -> Any:  # noqa: ANN401 - a class
        """Return the class of an entry with fields, built with its fields' classes; `base` adds behaviour."""
        entry = self.entries[name]
        if "dataclass" in entry.get("kind", ""):
            made = self._dataclass(name, entry, base)
        else:
            made = self._model(entry.get("name", name), entry, base or StrictBaseModel)
        self.classes[name] = self.classes[made.__name__] = made
        return made

    def signature(self, name: str) -> inspect.Signature:
        """Return the signature of an entry with parameters."""
        return inspect.Signature(
            [
                inspect.Parameter(
                    parameter["name"],
                    getattr(inspect.Parameter, parameter["kind"].upper()),
                    default=parameter.get("default", inspect.Parameter.empty),
                )
                for parameter in self.entries[name]["parameters"]
            ]
        )

    def _model(self, name: str, entry: dict[str, Any], base: Any) -> Any:  # noqa: ANN401 - classes
        fields: dict[str, Any] = {}
        for field in entry["fields"]:
            options = self._default(field)
            if constraint := field.get("constraint"):
                options |= eval(f"dict({constraint.partition(';')[0]})")
            if field.get("alias", field["name"]) != field["name"]:
                options["alias"] = field["alias"]
            fields[field["name"]] = (self._type(field), Field(**options))
        return create_model(name, __base__=base, __module__="tensorrt_llm.llmapi.llm_args", **fields)

    def _dataclass(self, name: str, entry: dict[str, Any], base: type | None) -> Any:  # noqa: ANN401 - a class
        fields: list[Any] = [
            (field["name"], self._type(field), dataclasses.field(**self._default(field))) for field in entry["fields"]
        ]
        private = {*entry.get("private_non_init", ())}
        if name == "SamplingParams":
            private.add("_stream_interval")  # the default of 1.3 is not known, only that it exists
        fields += [(field, Any, dataclasses.field(default=None, init=False, repr=False)) for field in sorted(private)]
        return dataclasses.make_dataclass(
            name, fields, bases=(base,) if base else (), slots=True, kw_only="kw_only" in entry["kind"]
        )

    def _default(self, field: dict[str, Any]) -> dict[str, Any]:
        if "default" not in field:
            return {}
        default = field["default"]
        if isinstance(default, list):
            return {"default_factory": lambda: list(default)} if default else {"default": default}
        if isinstance(default, str) and (factory := re.fullmatch(r"<factory (.+)\(\)>", default)):
            return {"default_factory": self._class("DecodeCudaGraphConfig" if factory[1] == "?" else factory[1])}
        enum, _, member = str(default).partition(".")
        return {"default": ENUMS[enum][member] if enum in ENUMS else default}

    def _type(self, field: dict[str, Any]) -> Any:  # noqa: ANN401 - a type
        annotation = field["annotation"].partition(" (")[0]
        for name in re.findall(r"\w+", annotation):
            if name not in self.classes and "fields" in self.entries.get(name, ()):
                self.build(name)
        try:
            return eval(annotation, {}, self.classes)
        except (AttributeError, SyntaxError, TypeError):
            return Any

    def _class(self, name: str) -> Any:  # noqa: ANN401 - a class
        if name in self.classes:
            return self.classes[name]
        entry = next((key for key, entry in self.entries.items() if name in (key, entry.get("name"))), None)
        if entry is not None:
            return self.build(entry)
        self.classes[name] = create_model(name, __base__=StrictBaseModel, __doc__=OPAQUE)
        return self.classes[name]
