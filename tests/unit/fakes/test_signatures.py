"""The stand-ins for tensorrt_llm against the recorded signatures of the real releases, and what our engine uses of these.

The tables are tests/fakes/tensorrt_llm/signatures-*.json: each entry says where it was read. An entry that the stand-in
is not measured by stands in NOT_COMPARED, with the reason.
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

# What our engine relies on, for each release: the keywords that it passes, the fields and attributes that it reads, and
# where it imports them from. Add to it whatever it begins to use: the tests below look it up in the tables.
USED: dict[str, dict[str, tuple[str, ...]]] = {
    "LLM.__init__": {"": ("model", "skip_tokenizer_init", "tensor_parallel_size", "dtype")},
    "LLM.generate_async": {"": ("inputs", "sampling_params", "streaming", "cache_salt")},
    "LLM.get_stats_async": {"": ("timeout",)},
    "LLM.shutdown": {},
    "LLM._check_health": {},
    "LLM.get_kv_cache_capacity": {},
    "TorchLlmArgs": {
        "": (
            "max_batch_size",
            "max_num_tokens",
            "max_seq_len",
            "enable_chunked_prefill",
            "enable_iter_perf_stats",
            "guided_decoding_backend",
            "load_format",
            "kv_cache_config",
            "scheduler_config",
            "cuda_graph_config",
        ),
        "1.2": ("sampler_type",),
    },
    "BaseLlmArgs": {"1.2": ("pipeline_parallel_size", "context_parallel_size", "gather_generation_logits")},
    "KvCacheConfig": {"": ("free_gpu_memory_fraction",)},
    "SchedulerConfig": {"": ("capacity_scheduler_policy",)},
    "SamplingParams": {
        "": (
            "end_id",
            "pad_id",
            "max_tokens",
            "min_tokens",
            "stop_token_ids",
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "prompt_ignore_length",
            "embedding_bias",
            "logprobs",
            "prompt_logprobs",
            "guided_decoding",
        ),
        "1.3": ("prompt_logprobs_simple_format",),
    },
    "GuidedDecodingParams": {"": ("json", "regex", "grammar")},
    "Logprob": {"": ("logprob", "rank")},
    "public imports": {
        "": (
            "tensorrt_llm.LLM",
            "tensorrt_llm.SamplingParams",
            "tensorrt_llm.llmapi.RequestError",
            "tensorrt_llm.llmapi.TorchLlmArgs",
            "tensorrt_llm.llmapi.GuidedDecodingParams",
            "tensorrt_llm.llmapi.KvCacheConfig",
            "tensorrt_llm.llmapi.SchedulerConfig",
            "tensorrt_llm.llmapi.CudaGraphConfig",
        ),
        "1.2": ("tensorrt_llm._tensorrt_engine.LLM", "tensorrt_llm.executor.utils.RequestError"),
    },
}
# Of these only one release has an entry; our engine asks whether it is there.
ONLY_IN = {
    "LLM._check_health": "1.2",
    "LLM.get_kv_cache_capacity": "1.3",
    "BaseLlmArgs": "1.2",
}

# Where the class of an entry is found, if not in tensorrt_llm.llmapi.
MODULES = {
    "BaseLlmArgs": "tensorrt_llm.llmapi.llm_args",
    "PeftCacheConfig": "tensorrt_llm.llmapi.llm_args",
    "Nvfp4GemmConfig": "tensorrt_llm.llmapi.llm_args",
    "_ParallelConfig": "trtllm_standin.arguments",
    "Logprob": "tensorrt_llm.executor.result",
    "IterationResult": "tensorrt_llm.executor.result",
    "PromptAdapterRequest": "tensorrt_llm.executor.request",
    "ErrorResponse": "tensorrt_llm.executor.utils",
    "SchedulingParams": "tensorrt_llm.scheduling_params",
    "LogitsProcessor": "tensorrt_llm.sampling_params",
    "BatchedLogitsProcessor": "tensorrt_llm.sampling_params",
}
NOT_COMPARED = {
    "LLM._collective_rpc": "for Ray, which the stand-in has not",
    "LLM attributes": "partly private; those that are used are used in tests of the stand-in",
    "executor methods used by LLM": "seen only where they are called",
    "PromptInputs": "a type alias",
    "type aliases": "types that the stand-in has as Any",
    "finish reasons": "tests of the stand-in have each of them",
    "LLM behaviour": "tests of the stand-in",
    "constants": "tests of the stand-in",
    "default sampler support": "tests of the stand-in",
    "stats": "every key is optional",
    "removed vs 1.2.x": "test_what_is_gone_is_gone",
    "import paths": "defining modules: test_classes_live_where_they_are_said_to",
}
# Names of inner modules that nothing of ours needs.
NOT_THERE = {
    "tensorrt_llm.executor": {"PostprocWorkerConfig"},
    "tensorrt_llm.llmapi.llm_args": {
        "MoeLoadBalancerConfig",
        "GuidedDecodingConfig",
        "RayPlacementConfig",
        "update_llm_args_with_extra_dict",
        "update_llm_args_with_extra_options",
        "get_model_format",
    },
    "tensorrt_llm.sampling_params": {"LogprobParams"},
    "tensorrt_llm.inputs": {"create_input_processor", "get_cache_salt_id"},
    "tensorrt_llm.lora_helper": {"LoraConfig"},
    "tensorrt_llm.llmapi.tokenizer": {"TokenizerBase", "tokenizer_factory"},
}


def entries(kind: str) -> list[Any]:
    """(version, name) of the entries that have a list of this kind, except those that are not compared."""
    return [
        pytest.param(version, name, id=f"{version}-{name}")
        for version, table in TABLES.items()
        for name, entry in table["entries"].items()
        if name not in NOT_COMPARED and kind in entry
    ]


def spell(value: object) -> object:
    """A default as the tables write it."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return list(value) if isinstance(value, tuple) else value


def spell_factory(factory: Any) -> str:  # noqa: ANN401 - anything that can be called
    """A default that is made anew, as the tables write it."""
    return f"<factory {factory.__name__}()>"


def fields_of(cls: Any) -> dict[str, object]:  # noqa: ANN401 - a class
    """Field → default, of a pydantic class, a dataclass or a named tuple: only what a caller can pass."""
    if hasattr(cls, "model_fields"):
        return {
            name: spell_factory(field.default_factory)
            if field.default_factory
            else (REQUIRED if field.is_required() else spell(field.default))
            for name, field in cls.model_fields.items()
        }
    if dataclasses.is_dataclass(cls):
        return {field.name: default_of(field) for field in dataclasses.fields(cls) if field.init}
    return dict.fromkeys(cls._fields, REQUIRED)


def default_of(field: dataclasses.Field[Any]) -> object:
    """A dataclass field's default."""
    if field.default_factory is not dataclasses.MISSING:
        return spell_factory(field.default_factory)
    return REQUIRED if field.default is dataclasses.MISSING else spell(field.default)


def recorded(entry: dict[str, Any], kind: str) -> dict[str, object]:
    """Name → default, as the table has it."""
    return {field["name"]: field.get("default", REQUIRED) for field in entry[kind]}


def class_of(standin: Standin, name: str) -> Any:  # noqa: ANN401 - a class
    """The class that an entry is about."""
    return standin.find(MODULES.get(name, "tensorrt_llm.llmapi"), name)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_entry_says_where_it_was_read_and_is_compared_or_says_why_not(version: str) -> None:
    table = TABLES[version]
    compared = {"fields", "parameters", "methods", "base", "names"}
    for name, entry in table["entries"].items():
        text = json.dumps(entry)
        assert '"sources"' in text, name
        assert '"checked"' in text, name
        assert name in NOT_COMPARED or name in ("public imports", "enums", "RequestError") or compared & entry.keys(), (
            name
        )
    mentioned = {source for entry in table["entries"].values() for source in sources_in(entry)}
    assert mentioned <= table["sources"].keys()


def sources_in(entry: object) -> list[str]:
    """Every source that an entry, or a part of it, names."""
    if isinstance(entry, dict):
        own = entry.get("sources", [])
        return [*own, *(found for part in entry.values() for found in sources_in(part))]
    return [found for part in entry for found in sources_in(part)] if isinstance(entry, list) else []


@pytest.mark.parametrize(("version", "name"), entries("fields"))
def test_fields(version: str, name: str) -> None:
    entry = TABLES[version]["entries"][name]
    expected = recorded(entry, "fields")
    with standing_in(version) as standin:
        cls = class_of(standin, name)
        found = fields_of(cls)
        if name == "TrtLlmArgs":
            # The table has what it adds to BaseLlmArgs.
            found = {
                field: default
                for field, default in found.items()
                if field not in fields_of(class_of(standin, "BaseLlmArgs"))
            }
        expected |= {field: found[field] for field, default in expected.items() if default == "<factory ?()>"}
        assert found == expected
        if hasattr(cls, "model_config"):
            assert cls.model_config["extra"] == "forbid"
        elif "dataclass" in entry.get("kind", ""):
            kinds = {p.name: p.kind.name.lower() for p in inspect.signature(cls).parameters.values()}
            assert kinds == {field["name"]: field.get("kind", kinds[field["name"]]) for field in entry["fields"]}
            assert list(found) == list(expected)
            if "slots" in entry["kind"]:
                assert not hasattr(cls.__new__(cls), "__dict__")
            if "kw_only" in entry["kind"]:
                assert set(kinds.values()) == {"keyword_only"}


@pytest.mark.parametrize(("version", "name"), entries("private_non_init"))
def test_private_fields_that_cannot_be_passed(version: str, name: str) -> None:
    with standing_in(version) as standin:
        private = {field.name for field in dataclasses.fields(class_of(standin, name)) if not field.init}
    assert private >= set(TABLES[version]["entries"][name]["private_non_init"])


@pytest.mark.parametrize(("version", "name"), entries("parameters"))
def test_parameters(version: str, name: str) -> None:
    entry = TABLES[version]["entries"][name]
    owner, method = name.split(".")
    with standing_in(version) as standin:
        function = getattr(class_of(standin, owner), method)
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        found = [
            (p.name, p.kind.name.lower(), REQUIRED if p.default is p.empty else spell(p.default)) for p in parameters
        ]
        assert not inspect.iscoroutinefunction(function)
    assert found == [(p["name"], p["kind"], p.get("default", REQUIRED)) for p in entry["parameters"]]


@pytest.mark.parametrize("version", VERSIONS)
def test_results(version: str) -> None:
    entry = TABLES[version]["entries"]["RequestOutput"]
    with standing_in(version) as standin:
        cls = class_of(standin, "RequestOutput")
        assert {base.__name__ for base in cls.__mro__} >= set(entry["bases"])
        made = standin.llm().generate_async([1], standin.params())
        wanted = [*entry["attributes"], *entry.get("attributes_undocumented_older", ()), *entry["methods"]]
        missing = [name for name in wanted if not hasattr(made, name.split(" ")[0].split("(")[0])]
        assert missing == []
        for name in entry.get("read_only_properties", ()):
            assert isinstance(inspect.getattr_static(cls, name), property)
        assert hasattr(made, "error") is (version == "1.3")
        properties = TABLES[version]["entries"]["CompletionOutput"]["properties"]
        assert all(isinstance(getattr(class_of(standin, "CompletionOutput"), name), property) for name in properties)
        assert inspect.signature(cls.result).parameters["timeout"].default is None


def test_iteration_results() -> None:
    with standing_in("1.2") as standin:
        cls = class_of(standin, "IterationResult")
        for name in TABLES["1.2"]["entries"]["IterationResult"]["methods"]:
            assert hasattr(cls, name.split("(")[0]), name
        assert cls()._timeout == TABLES["1.2"]["entries"]["IterationResult"]["default_timeout"]


@pytest.mark.parametrize("version", VERSIONS)
def test_imports(version: str) -> None:
    with standing_in(version) as standin:
        for module, entry in TABLES[version]["entries"]["public imports"].items():
            absent = NOT_THERE.get(module, set())
            assert absent <= set(entry["names"])
            for name in set(entry["names"]) - absent:
                assert standin.find(module, name) is not None, f"{module}.{name}"


@pytest.mark.parametrize("version", VERSIONS)
def test_classes_live_where_they_are_said_to(version: str) -> None:
    with standing_in(version) as standin:
        error = standin.find("tensorrt_llm.llmapi", "RequestError")
        assert (error.__module__, error.__base__) == ("tensorrt_llm.executor.utils", RuntimeError)
        assert error is standin.find("tensorrt_llm.executor.utils", "RequestError")
        for name, module in (
            ("LLM", "tensorrt_llm.llmapi.llm"),
            ("RequestOutput", "tensorrt_llm.llmapi.llm"),
            ("TorchLlmArgs", "tensorrt_llm.llmapi.llm_args"),
            ("SamplingParams", "tensorrt_llm.sampling_params"),
            ("GuidedDecodingParams", "tensorrt_llm.sampling_params"),
            ("CompletionOutput", "tensorrt_llm.executor.result"),
            ("DisaggregatedParams", "tensorrt_llm.disaggregated_params"),
        ):
            assert class_of(standin, name).__module__ == module
        assert standin.find("tensorrt_llm.llmapi", "LlmArgs") is class_of(standin, "TorchLlmArgs")
        assert standin.package.LLM.__bases__[0].__name__ == "_TorchLLM"


@pytest.mark.parametrize("version", VERSIONS)
def test_enumerations(version: str) -> None:
    recorded_enums = TABLES[version]["entries"]["enums"]
    found = set()
    with standing_in(version) as standin:
        for name, entry in recorded_enums.items():
            members = entry.get("values") if isinstance(entry, dict) else entry
            module = "tensorrt_llm.sampling_params" if name == "LogprobMode" else "tensorrt_llm.llmapi.llm_args"
            try:
                cls = standin.find(module, name)
            except (AttributeError, ModuleNotFoundError):
                continue
            found.add(name)
            if isinstance(members, list):
                assert [member.name for member in cls] == members
            elif members is not None:
                assert {member.name: member.value for member in cls} == members
    assert found >= {"CapacitySchedulerPolicy", "ContextChunkingPolicy", "LoadFormat"}
    assert found >= ({"SamplerType", "BatchingType"} if version == "1.2" else {"WaitingQueuePolicy", "LogprobMode"})


def test_what_is_gone_is_gone() -> None:
    gone = TABLES["1.3"]["entries"]["removed vs 1.2.x"]
    with standing_in("1.3") as standin:
        assert (
            not {name.split()[0] for name in gone["TorchLlmArgs"]} & fields_of(class_of(standin, "TorchLlmArgs")).keys()
        )
        assert (
            not {name.split()[0] for name in gone["KvCacheConfig"]}
            & fields_of(class_of(standin, "KvCacheConfig")).keys()
        )
        assert not set(gone["SamplingParams"]) & fields_of(class_of(standin, "SamplingParams")).keys()
        for name in ("TrtLlmArgs", "BuildConfig", "BuildCacheConfig"):
            with pytest.raises(AttributeError):
                standin.find("tensorrt_llm.llmapi", name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", USED)
def test_what_our_engine_uses_is_there(version: str, name: str) -> None:
    used = {*USED[name].get("", ()), *USED[name].get(version, ())}
    if ONLY_IN.get(name, version) != version:
        assert name not in TABLES[version]["entries"]
    else:
        assert used <= names_in(version, name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("protocol", [api.RequestOutput, api.CompletionOutput, api.LLM])
def test_what_our_engine_is_typed_by_is_there(version: str, protocol: type) -> None:
    members = {
        *protocol.__annotations__,
        *(name for name, value in vars(protocol).items() if inspect.isfunction(value)),
    }
    public = {name for name in members if not name.startswith("_")}
    assert public
    for name in public:
        if protocol is api.LLM:
            assert f"LLM.{name}" in TABLES[version]["entries"]
        else:
            assert name in names_in(version, protocol.__name__)


def names_in(version: str, name: str) -> set[str]:
    """Everything that an entry names: fields, parameters, attributes, methods; of imports their full names."""
    entry = TABLES[version]["entries"][name]
    if name == "public imports":
        return {f"{module}.{one}" for module, names in entry.items() for one in names["names"]}
    lists = ("attributes", "methods", "properties", "attributes_undocumented_older")
    return {field["name"] for kind in ("fields", "parameters") for field in entry.get(kind, ())} | {
        one for kind in lists for one in entry.get(kind, ())
    }
