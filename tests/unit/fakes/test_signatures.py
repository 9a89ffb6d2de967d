"""The stand-in against the recorded signatures of TensorRT-LLM.

The tables tests/fakes/tensorrt_llm/trtllm_standin/signatures-*.json say where each entry was read. The stand-in builds its classes and
methods from them and refuses every other argument and field, except those of results.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from standin import VERSIONS, importable, table

from text_generation_shard.engines.tensorrt_llm import statistics


@pytest.fixture(scope="module", params=VERSIONS)
def entries(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The recorded entries of a release that is importable."""
    with pytest.MonkeyPatch.context() as patch, importable(request.param, patch):
        yield table(request.param)["entries"]


@pytest.mark.parametrize("name", ["CompletionOutput", "Logprob", "RequestOutput"])
def test_outputs_have_recorded_names_only(entries: dict[str, Any], name: str) -> None:
    cls, entry = getattr(import_module("trtllm_standin.results"), name), entries[name]
    found = {*vars(cls), *getattr(cls, "__dataclass_fields__", ())}
    recorded = {field["name"] for field in entry.get("fields", ())}
    for kind in ("attributes", "methods", "attributes_undocumented_older"):
        recorded.update(entry.get(kind, ()))
    assert {each for each in found if not each.startswith("_")} - {"extend"} <= recorded


def test_parameters(entries: dict[str, Any]) -> None:
    methods = [name for name, entry in entries.items() if name.startswith("LLM.") and "parameters" in entry]
    assert len(methods) > 3
    llm = import_module("tensorrt_llm").LLM
    for name in {*methods} - {"LLM._collective_rpc"}:
        function = getattr(llm, name.partition(".")[2])
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        found = [(p.name, p.kind.name.lower(), "(required)" if p.default is p.empty else p.default) for p in parameters]
        assert not inspect.iscoroutinefunction(function)
        recorded = entries[name]["parameters"]
        assert found == [(p["name"], p["kind"], p.get("default", "(required)")) for p in recorded], name


def test_every_key_that_is_read_of_the_statistics_is_recorded() -> None:
    """The keys are strings in camel case, which nothing else in the module is."""
    entries = [entry for version in VERSIONS for entry in table(version)["entries"]["stats"].values()]
    recorded = {key.partition(" ")[0] for entry in entries if isinstance(entry, list) for key in entry}
    texts = {
        node.value for node in ast.walk(ast.parse(inspect.getsource(statistics))) if isinstance(node, ast.Constant)
    }
    camel = {text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z]+([A-Z][a-z]*)+", text)}
    assert len(camel) > 10
    assert camel <= recorded


@pytest.mark.parametrize("version", VERSIONS)
def test_every_row_names_its_source_and_every_source_its_commit(version: str) -> None:
    recorded = table(version)
    for name, entry in recorded["entries"].items():
        rows = entry.values() if name == "public imports" else [entry]
        for row in rows:
            assert row["sources"], name
            assert set(row["sources"]) <= recorded["sources"].keys(), name
    for source in recorded["sources"].values():
        assert re.search(r"@ [0-9a-f]{40}|commit not known|pull requests", source), source
