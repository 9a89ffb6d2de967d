"""--trtllm-options: read from a file or inline; unknown names are refused with the nearest known one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.options import MAX_BYTES, RESERVED, check_options, read_options

KNOWN: Mapping[str, Collection[str] | None] = {
    "model": None,
    "tensor_parallel_size": None,
    "max_batch_size": None,
    "max_num_tokens": None,
    "stream_interval": None,
    "speculative_config": None,
    "kv_cache_config": frozenset({"enable_block_reuse", "free_gpu_memory_fraction", "host_cache_size", "dtype"}),
    "cuda_graph_config": ["batch_sizes", "max_batch_size", "enable_padding"],
}
"""Some keywords of tensorrt_llm.LLM; two with the fields of their models."""

YAML = """
# an example
max_num_tokens: 4096
kv_cache_config:
  enable_block_reuse: false
  free_gpu_memory_fraction: 0.85
cuda_graph_config: null
speculative_config:
  decoding_type: MTP
  num_nextn_predict_layers: 3
moe_config:
  load_balancer:
    initial_global_assignments:
      0: [0, 1]
      1: [1, 0]
"""
OPTIONS = {
    "max_num_tokens": 4096,
    "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.85},
    "cuda_graph_config": None,
    "speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 3},
    "moe_config": {"load_balancer": {"initial_global_assignments": {0: [0, 1], 1: [1, 0]}}},
}


def refusal(text: str) -> str:
    """Return the error."""
    with pytest.raises(EngineError) as refused:
        read_options(text)
    line = str(refused.value)
    assert line.startswith("--trtllm-options: ")
    assert len(line.splitlines()) == 1
    return line


# -------------------------------------------------------------------------------------------------------------- reading


def test_file_and_inline_text(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(YAML)
    assert read_options(str(path)) == OPTIONS
    assert read_options(YAML) == OPTIONS


@pytest.mark.parametrize(
    "text",
    [
        "max_num_tokens: 4096",
        "{max_num_tokens: 4096}",
        '{"max_num_tokens": 4096}',
        '{\n\t"max_num_tokens":\t4096\n}',
        "max_num_tokens:\n  4096",
        " \n{max_num_tokens: 4096,}",
    ],
)
def test_yaml_and_json(text: str) -> None:
    assert read_options(text) == {"max_num_tokens": 4096}


def test_json_numbers(tmp_path: Path) -> None:
    """YAML 1.1 reads a string there."""
    path = tmp_path / "options.json"
    path.write_text('{"kv_cache_config": {"free_gpu_memory_fraction": 9e-1}}')
    assert read_options(str(path)) == {"kv_cache_config": {"free_gpu_memory_fraction": 0.9}}


@pytest.mark.parametrize("text", ["", "  ", "\n", "# max_num_tokens: 4096\n", "{}", "---\n", "null\n"])
def test_nothing_asked_for_is_nothing(tmp_path: Path, text: str) -> None:
    assert read_options(text) == {}
    path = tmp_path / "options.yaml"
    path.write_text(text)
    assert read_options(str(path)) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- max_num_tokens\n- 4096", ("names with values", "['max_num_tokens', 4096]")),
        ("just\nwords", ("names with values", "'just words'")),
        ("max_num_tokens: 1\nmax_batch_size: 2\nmax_num_tokens: 3", ("line 3", "'max_num_tokens' is there twice")),
        ("{max_num_tokens: 1, max_num_tokens: 1}", ("line 1", "'max_num_tokens' is there twice")),
        ('{"max_num_tokens": 1, "max_num_tokens": 2}', ("'max_num_tokens' is there twice",)),
        ("kv_cache_config:\n  dtype: fp8\n  dtype: auto", ("line 3", "'dtype' is there twice")),
        ('{"kv_cache_config": {"dtype": "fp8", "dtype": "auto"}}', ("'dtype' is there twice",)),
        ("a:\n- x: 1\n  x: 2", ("line 3", "'x' is there twice")),
        ("1: 2", ("line 1", "'1' is not read as text", "quotes")),
        ("max_num_tokens: 1\non: true", ("line 2", "'on' is not read as text", "quotes")),
        ("null: 1", ("'null' is not read as text",)),
        ("? [a]\n: 1", ("'a sequence' is not read as text",)),
        ("a: {? [b] : 1}", ("unhashable",)),
        ("kv: &kv {dtype: fp8}\nkv_cache_config: *kv", ("line 1", "anchors are not supported")),
        ("a: &a [*a]", ("line 1", "anchors are not supported")),
        ("kv: *nowhere", ("line 1", "undefined alias")),
        ("a: 1\n b: 2", ("line 2", "mapping values are not allowed here")),
        ("{max_num_tokens: 1", ("line 1", "while parsing a flow mapping")),
        ('{"max_num_tokens": ', ("line 1", "while parsing")),
        ("max_num_tokens: [1, 2", ("line 1",)),
        ("a: 1\n---\nb: 2", ("expected a single document",)),
        ("a: !!python/object/apply:os.system ['true']", ("line 1", "could not determine a constructor")),
        ("a: !mine 1", ("line 1", "could not determine a constructor")),
        ("a: \0", ("special characters are not allowed",)),
        ("a: \udc80", ("special characters are not allowed",)),
        ("a: 2026-02-30", ("does not fit its type", "day is out of range")),
        ("a: !!int ''", ("does not fit its type",)),
        ("a: !!bool perhaps", ("does not fit its type",)),
        ("a: !!timestamp soon", ("does not fit its type",)),
        ("a: " + "1" * 5000, ("does not fit its type",)),
        ("{a: " + "[" * 3_000, ("nested too deeply",)),
    ],
    ids=lambda value: None,
)
def test_malformed_text_is_refused_in_one_line(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    line = refusal(text)
    for word in words:
        assert word in line
    path = tmp_path / "options.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    in_file = refusal(str(path))
    assert str(path) in in_file
    if "\udc80" not in text:
        assert in_file.removeprefix(f"--trtllm-options: {path}: ") == line.removeprefix("--trtllm-options: ")


def test_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    assert f"{path}: there is no such file" in refusal(str(path))
    assert "'{max_num_tokens: 4096}'" in refusal("max_num_tokens=4096")
    assert f"{tmp_path}: is not a file" in refusal(str(tmp_path))
    assert "cannot be read: File name too long" in refusal("x" * 5000)
    path.write_bytes(b"max_num_tokens: \xff")
    assert f"{path}: is not UTF-8: invalid start byte at byte 16" in refusal(str(path))
    path.write_bytes(b"#" * MAX_BYTES)
    assert read_options(str(path)) == {}
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    assert f"{path}: is longer than {MAX_BYTES} bytes" in refusal(str(path))


@given(
    text=st.text(alphabet=st.sampled_from("ab1: \n\t-[]{}&*!#|>'\"%@`,?~<=.é\0"), max_size=30) | st.text(max_size=30)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        options = read_options(text)
    except EngineError as refused:
        assert len(str(refused).splitlines()) == 1
    else:
        assert all(isinstance(name, str) for name in options)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(options=st.dictionaries(st.text(max_size=8), json_values, max_size=4), indent=st.sampled_from([None, 2, "\t"]))
def test_json_round_trip(options: dict[str, object], indent: int | str | None) -> None:
    assert read_options(json.dumps(options, indent=indent)) == options


# ------------------------------------------------------------------------------------------------------------- checking


def complaint(options: Mapping[str, object], known: Mapping[str, Collection[str] | None] | None = KNOWN) -> str:
    with pytest.raises(EngineError) as refused:
        check_options(options, known)
    line = str(refused.value)
    assert line.startswith("--trtllm-options: ")
    assert len(line.splitlines()) == 1
    return line


@pytest.mark.parametrize("known", [KNOWN, None], ids=["known", "not known"])
def test_reserved_options_are_refused_with_the_alternative(known: Mapping[str, Collection[str] | None] | None) -> None:
    for name, instead in RESERVED.items():
        assert (
            complaint({"max_num_tokens": 1, name: 1}, known) == f"--trtllm-options: {name} is not set here: {instead}"
        )
    assert "--num-shard" in complaint({"tensor_parallel_size": 2}, known)
    assert "--model-id" in complaint({"model": "m"}, known)
    assert "--dtype" in complaint({"dtype": "bfloat16"}, known)
    assert "tokenizer" in complaint({"skip_tokenizer_init": False}, known)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"max_num_token": 1},
            "the installed TensorRT-LLM has no option 'max_num_token', the nearest is max_num_tokens",
        ),
        ({"kv_cache": {}}, "the installed TensorRT-LLM has no option 'kv_cache', the nearest is kv_cache_config"),
        (
            {"tensor_parallel": 2},
            "the installed TensorRT-LLM has no option 'tensor_parallel', "
            "the nearest is tensor_parallel_size (use --num-shard)",
        ),
        (
            {"tokeniser": "t"},
            "the installed TensorRT-LLM has no option 'tokeniser', "
            "the nearest is tokenizer (the router tokenizes, with the tokenizer of --model-id)",
        ),
        ({"zzz": 1}, "the installed TensorRT-LLM has no option 'zzz'"),
        ({"a\nb": 1}, "the installed TensorRT-LLM has no option 'a\\nb'"),
        (
            {"kv_cache_config": {"enable_block_reuse": True, "free_gpu_mem_fraction": 0.9}},
            "kv_cache_config has no field 'free_gpu_mem_fraction', the nearest is free_gpu_memory_fraction",
        ),
        (
            {"cuda_graph_config": {"batchsizes": [1]}},
            "cuda_graph_config has no field 'batchsizes', the nearest is batch_sizes",
        ),
        ({"kv_cache_config": {"dtyp": "fp8"}}, "kv_cache_config has no field 'dtyp', the nearest is dtype"),
        ({"kv_cache_config": {1: 2}}, "kv_cache_config has no field 1"),
    ],
    ids=lambda value: None,
)
def test_unknown_names_are_refused_with_the_nearest_one(options: dict[str, object], line: str) -> None:
    assert complaint(options) == f"--trtllm-options: {line}"
    check_options(options, None)


def test_values_are_not_checked() -> None:
    check_options(
        {
            "max_batch_size": "many",
            "kv_cache_config": {"free_gpu_memory_fraction": None, "dtype": {"nested": [1]}},
            "cuda_graph_config": None,
            "speculative_config": {"any": "field"},
        },
        KNOWN,
    )
    check_options({"kv_cache_config": [1], "cuda_graph_config": "off"}, KNOWN)
    check_options({}, KNOWN)
    check_options({}, None)
    check_options({"anything": 1}, None)
