"""The stand-in against the recorded signatures of TensorRT-LLM, and the names that the engine uses.

The tables tests/fakes/tensorrt_llm/signatures-*.json say where each entry was read. The stand-in builds most of its classes from
them; these tests check the result.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
from typing import Any

import pytest
from standin_loading import FAKES, VERSIONS, Standin, standing_in

from text_generation_shard.engines.tensorrt_llm import api

TABLES: dict[str, dict[str, Any]] = {
    version: json.loads((FAKES / f"signatures-{version}.json").read_text()) for version in VERSIONS
}
REQUIRED = "(required)"
USED = {
    "LLM.__init__": {"": "model skip_tokenizer_init tensor_parallel_size dtype"},
    "LLM.generate_async": {"": "inputs sampling_params streaming cache_salt"},
    "LLM.get_stats_async": {"": "timeout"},
    "LLM.shutdown": {},
    "LLM._check_health": {},
    "LLM.get_kv_cache_capacity": {},
    "TorchLlmArgs": {
        "": "max_batch_size max_num_tokens max_seq_len enable_chunked_prefill enable_iter_perf_stats load_format "
        "guided_decoding_backend kv_cache_config scheduler_config cuda_graph_config",
        "1.2": "sampler_type",
    },
    "BaseLlmArgs": {"1.2": "pipeline_parallel_size context_parallel_size gather_generation_logits"},
    "KvCacheConfig": {"": "free_gpu_memory_fraction tokens_per_block"},
    "SchedulerConfig": {"": "capacity_scheduler_policy"},
    "SamplingParams": {
        "": "end_id pad_id max_tokens min_tokens stop_token_ids include_stop_str_in_output ignore_eos detokenize "
        "temperature top_k top_p min_p seed repetition_penalty presence_penalty frequency_penalty "
        "prompt_ignore_length embedding_bias logprobs prompt_logprobs guided_decoding",
        "1.3": "prompt_logprobs_simple_format",
    },
    "GuidedDecodingParams": {"": "json regex grammar"},
    "Logprob": {"": "logprob rank"},
    "public imports": {
        "": "tensorrt_llm.LLM tensorrt_llm.SamplingParams tensorrt_llm.llmapi.RequestError "
        "tensorrt_llm.llmapi.TorchLlmArgs tensorrt_llm.llmapi.GuidedDecodingParams tensorrt_llm.llmapi.KvCacheConfig "
        "tensorrt_llm.llmapi.SchedulerConfig tensorrt_llm.llmapi.CudaGraphConfig",
        "1.2": "tensorrt_llm._tensorrt_engine.LLM tensorrt_llm.executor.utils.RequestError",
    },
}
"""Entry → release ("": both) → the names that the engine uses: keywords, fields, attributes, imports."""
ONLY_IN = {"LLM._check_health": "1.2", "LLM.get_kv_cache_capacity": "1.3", "BaseLlmArgs": "1.2"}
"""Entries of one release; the engine checks whether they exist."""

MODULES = {
    "LLM": "tensorrt_llm.llmapi.llm",
    "TorchLlmArgs": "tensorrt_llm.llmapi.llm_args",
    "BaseLlmArgs": "tensorrt_llm.llmapi.llm_args",
    "SamplingParams": "tensorrt_llm.sampling_params",
    "GuidedDecodingParams": "tensorrt_llm.sampling_params",
    "CompletionOutput": "tensorrt_llm.executor.result",
    "Logprob": "tensorrt_llm.executor.result",
    "RequestError": "tensorrt_llm.executor.utils",
    "ErrorResponse": "tensorrt_llm.executor.utils",
    "RequestOutput": "tensorrt_llm.llmapi.llm",
}
"""Classes that the stand-in implements → the module that defines them."""
FIELDS = ("KvCacheConfig", "SchedulerConfig", "CudaGraphConfig", "TrtLlmArgs", *MODULES)
"""Entries whose fields are compared."""


def cases(kind: str, names: tuple[str, ...] = ()) -> list[Any]:
    """(version, name) of the entries with a list of this kind."""
    return [
        pytest.param(version, name, id=f"{version}-{name}")
        for version, table in TABLES.items()
        for name, entry in table["entries"].items()
        if kind in entry and (name in names or name.startswith("LLM.")) and name != "LLM._collective_rpc"
    ]


def class_of(standin: Standin, name: str) -> Any:  # noqa: ANN401 - a class
    return standin.find(MODULES.get(name, "tensorrt_llm.llmapi"), name)


def spell(value: object) -> object:
    """A default as the tables write it."""
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else value


def fields_of(cls: Any) -> dict[str, object]:  # noqa: ANN401 - a class
    """Field → default of a pydantic class, a dataclass or a named tuple, without private fields."""
    if hasattr(cls, "_fields"):
        return dict.fromkeys(cls._fields, REQUIRED)
    if hasattr(cls, "model_fields"):
        fields = [(name, field.default_factory, field.get_default()) for name, field in cls.model_fields.items()]
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
    else:
        missing = dataclasses.MISSING
        known = [field for field in dataclasses.fields(cls) if field.init]
        fields = [(f.name, None if f.default_factory is missing else f.default_factory, f.default) for f in known]
        required = {f.name for f in known if f.default is f.default_factory is missing}
    return {
        name: REQUIRED if name in required else f"<factory {factory.__name__}()>" if factory else spell(default)
        for name, factory, default in fields
    }


@pytest.mark.parametrize(("version", "name"), cases("fields", FIELDS))
def test_fields(version: str, name: str) -> None:
    entry = TABLES[version]["entries"][name]
    expected = {field["name"]: field.get("default", REQUIRED) for field in entry["fields"]}
    with standing_in(version) as standin:
        cls = class_of(standin, name)
        found = fields_of(cls)
        if name == "TrtLlmArgs":  # the table has its additions to BaseLlmArgs
            inherited = fields_of(class_of(standin, "BaseLlmArgs"))
            found = {field: default for field, default in found.items() if field not in inherited}
        expected |= {field: found[field] for field, default in expected.items() if default == "<factory ?()>"}
        assert found == expected
        if hasattr(cls, "model_config"):
            assert cls.model_config["extra"] == "forbid"
        elif "dataclass" in entry.get("kind", ""):
            keyword_only = {p.kind is p.KEYWORD_ONLY for p in inspect.signature(cls).parameters.values()}
            assert keyword_only == {"kw_only" in entry["kind"]}
            assert "slots" not in entry["kind"] or not hasattr(cls.__new__(cls), "__dict__")
            private = {field.name for field in dataclasses.fields(cls) if not field.init}
            assert private >= set(entry.get("private_non_init", ()))


@pytest.mark.parametrize(("version", "name"), cases("parameters"))
def test_parameters(version: str, name: str) -> None:
    entry = TABLES[version]["entries"][name]
    with standing_in(version) as standin:
        function = getattr(class_of(standin, "LLM"), name.partition(".")[2])
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        found = [(p.name, p.kind.name.lower(), REQUIRED if p.default is p.empty else p.default) for p in parameters]
        assert not inspect.iscoroutinefunction(function)
    assert found == [(p["name"], p["kind"], p.get("default", REQUIRED)) for p in entry["parameters"]]


@pytest.mark.parametrize("version", VERSIONS)
def test_public_names_are_defined_in_their_modules(version: str) -> None:
    with standing_in(version) as standin:
        for module, entry in TABLES[version]["entries"]["public imports"].items():
            for name in entry["names"]:
                assert standin.find(module, name) is not None, f"{module}.{name}"
        for name, module in MODULES.items():
            if ONLY_IN.get(name, version) == version:
                assert class_of(standin, name).__module__ == module
        assert standin.find("tensorrt_llm.llmapi", "RequestError").__base__ is RuntimeError
        assert standin.find("tensorrt_llm.llmapi", "LlmArgs") is class_of(standin, "TorchLlmArgs")
        assert standin.package.LLM.__bases__[0].__name__ == "_TorchLLM"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", USED)
def test_names_that_the_engine_uses_exist(version: str, name: str) -> None:
    used = {*USED[name].get("", "").split(), *USED[name].get(version, "").split()}
    if ONLY_IN.get(name, version) != version:
        assert name not in TABLES[version]["entries"]
    else:
        assert used <= names_in(version, name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("protocol", [api.RequestOutput, api.CompletionOutput, api.LLM])
def test_members_of_the_protocols_exist(version: str, protocol: type) -> None:
    functions = [name for name, value in vars(protocol).items() if inspect.isfunction(value)]
    public = {name for name in (*protocol.__annotations__, *functions) if not name.startswith("_")}
    assert public
    for name in public:
        if protocol is api.LLM:
            assert f"LLM.{name}" in TABLES[version]["entries"]
        else:
            assert name in names_in(version, protocol.__name__)


def names_in(version: str, name: str) -> set[str]:
    """The names in an entry: fields, parameters, attributes, methods; of imports their full names."""
    entry = TABLES[version]["entries"][name]
    if name == "public imports":
        return {f"{module}.{found}" for module, names in entry.items() for found in names["names"]}
    lists = ("attributes", "methods", "properties", "attributes_undocumented_older")
    return {field["name"] for kind in ("fields", "parameters") for field in entry.get(kind, ())} | {
        found for kind in lists for found in entry.get(kind, ())
    }
