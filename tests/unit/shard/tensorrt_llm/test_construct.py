"""The keywords that an engine is constructed with, and the limits that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from model_folders import ENGINE, RANKS, compiled_engine, fill
from standin import VERSIONS, importable, model_folder
from trtllm_engines import constructed

from text_generation_proto.values import GrammarKind
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.construct import Construction, construct_compiled
from text_generation_shard.engines.tensorrt_llm.library import Library, is_healthy, load_library
from text_generation_shard.engines.tensorrt_llm.options import check_options


@pytest.fixture(scope="module", params=VERSIONS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    with pytest.MonkeyPatch.context() as patch, importable(request.param, patch):
        yield load_library()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("engines") / "engines", ENGINE, RANKS)


def compiled(engines: Path, options: dict[str, object] | None = None, **settings: object) -> Construction:
    config = ShardConfig(engine="tensorrt-llm", model_path=str(engines), tensor_parallel=2, **settings)  # type: ignore[arg-type]
    return construct_compiled(config, compiled_engine(engines), options or {})


def test_defaults(library: Library, tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    how = constructed(library, model)
    assert how.keywords == {
        "model": str(model),
        "max_batch_size": 256,
        "max_num_tokens": 8192,
        "max_seq_len": 2048,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.9},
        "tensor_parallel_size": 1,
        "skip_tokenizer_init": True,
        "dtype": "auto",
    } | ({"generation_config": "trtllm"} if library.version.startswith("1.3") else {})
    info = how.info
    assert (info.max_slots, info.suggested_prefill_tokens, info.max_sequence_length) == (256, 8192, 2048)
    assert (info.engine, info.vocab_size, info.eos_token_ids, info.dtype) == ("tensorrt-llm", 4096, (2,), "bfloat16")
    assert (info.reserves_max_length, info.grammar_kinds, info.block_size) == (True, (), 32)
    assert (info.max_top_n_tokens, info.unsupported) == (20, how.capabilities.unsupported)


def test_settings_and_options(library: Library, tmp_path: Path) -> None:
    options = {
        "max_seq_len": 1024,
        "kv_cache_config": {"dtype": "fp8"},
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    }
    how = constructed(
        library,
        model_folder(tmp_path),
        options,
        tensor_parallel=4,
        max_batch_size=8,
        dtype="bfloat16",
        load_format="dummy",
        cuda_memory_fraction=0.5,
    )
    keywords = how.keywords
    assert (keywords["tensor_parallel_size"], keywords["dtype"], keywords["load_format"]) == (4, "bfloat16", "DUMMY")
    assert keywords["kv_cache_config"] == {"free_gpu_memory_fraction": 0.5, "dtype": "fp8"}
    assert (how.info.max_slots, how.info.max_sequence_length, how.info.reserves_max_length) == (8, 1024, False)
    options = {"kv_cache_config": {"free_gpu_memory_fraction": 0.3}}  # an option wins over the flag's default
    how = constructed(library, model_folder(tmp_path), options, cuda_memory_fraction=0.5)
    assert how.keywords["kv_cache_config"] == {"free_gpu_memory_fraction": 0.3}


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        (..., [GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK]),
        ("xgrammar", [GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.EBNF, GrammarKind.STRUCTURAL_TAG]),
        (None, []),
    ],
    ids=str,
)
def test_grammar_kinds_depend_on_the_backend(
    library: Library, tmp_path: Path, backend: object, kinds: list[GrammarKind]
) -> None:
    (tmp_path / "tokenizer.json").touch()
    options = {} if backend is ... else {"guided_decoding_backend": backend}
    how = constructed(library, model_folder(tmp_path), options)
    assert list(how.info.grammar_kinds) == kinds
    assert how.keywords["skip_tokenizer_init"] is (backend is None)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kv_cache_config": {"tokens_per_block": "a"}}, "tokens_per_block must be a whole number above 0, not 'a'"),
        ({"kv_cache_config": {"tokens_per_block": None}}, "tokens_per_block must be a whole number above 0, not None"),
        ({"kv_cache_config": []}, "kv_cache_config must be a mapping"),
        (
            {"kv_cache_config": {"event_buffer_max_size": 64}},
            "kv_cache_config: event_buffer_max_size is not set here: nothing reads the events",
        ),
        ({"max_batch_size": 0}, "max_batch_size must be a whole number above 0, not 0"),
        ({"max_batch_size": True}, "max_batch_size must be a whole number above 0, not True"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(
    library: Library, tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    with pytest.raises(EngineError) as caught:
        constructed(library, model_folder(tmp_path), options)
    assert str(caught.value) == f"--trtllm-options: {problem}"


def test_health_is_asked_of_the_library(library: Library, tmp_path: Path) -> None:
    llm = library.llm(str(model_folder(tmp_path)), skip_tokenizer_init=True)
    assert is_healthy(llm)
    llm.shutdown()
    assert not is_healthy(llm)


def test_compiled_defaults(engines: Path) -> None:
    how = compiled(engines)
    assert how.keywords == {
        "model": str(engines),
        "enable_chunked_prefill": True,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.9},
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "skip_tokenizer_init": True,
        "gather_generation_logits": True,
    }
    assert (how.info.max_sequence_length, how.info.reserves_max_length) == (4096, True)


@pytest.mark.parametrize(
    ("options", "settings", "slots", "tokens"),
    [
        ({}, {}, 64, 8192),
        ({}, {"max_batch_size": 4}, 4, 8192),
        ({"max_batch_size": 8, "max_num_tokens": 1000}, {"max_batch_size": 4}, 8, 1000),
        ({"max_batch_size": 1000, "max_num_tokens": 100_000}, {}, 64, 8192),
    ],
    ids=["as built", "flag", "option", "more than was built"],
)
def test_limits_of_a_compiled_engine(
    engines: Path, options: dict[str, object], settings: dict[str, object], slots: int, tokens: int
) -> None:
    how = compiled(engines, options, **settings)
    assert (how.info.max_slots, how.info.suggested_prefill_tokens) == (slots, tokens)
    assert min(how.keywords.get("max_batch_size", 64), 64) == slots


def test_fixed_settings_of_a_compiled_engine_are_refused(engines: Path) -> None:
    with pytest.raises(EngineError, match="max_seq_len was fixed when the engines"):
        compiled(engines, {"max_seq_len": 128})
    with pytest.raises(EngineError, match="were built for bfloat16"):
        compiled(engines, dtype="float16")


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("iter_stats_max_iteration", "the nearest is iter_stats_max_iterations"),
        ("event", "no option 'event'"),
        ("stream_interval", "no option 'stream_interval'"),
    ],
    ids=["misspelled", "unknown", "other backend"],
)
def test_unknown_options_of_a_compiled_engine_are_refused(library: Library, option: str, problem: str) -> None:
    assert (library.engine_options is None) is (library.engine_llm is None) is library.version.startswith("1.3")
    if library.engine_options is not None:
        with pytest.raises(EngineError, match=problem):
            check_options({option: 5}, library.engine_options)


def test_stages_divide_the_gpus(library: Library, tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    options: dict[str, object] = {"pipeline_parallel_size": 2, "enable_attention_dp": True}
    how = constructed(library, model, options, tensor_parallel=8, gpus_per_node=4)
    sizes = {name: how.keywords[f"{name}_parallel_size"] for name in ("tensor", "pipeline")}
    assert (sizes, how.keywords["gpus_per_node"], how.info.ranks) == ({"tensor": 4, "pipeline": 2}, 4, 4)
    alone = constructed(library, model, tensor_parallel=8).keywords
    assert alone["tensor_parallel_size"] == 8
    assert not {"pipeline_parallel_size", "gpus_per_node"} & alone.keys()
    with pytest.raises(EngineError, match="must divide the number of GPUs"):
        constructed(library, model, {"pipeline_parallel_size": 3}, tensor_parallel=8)
