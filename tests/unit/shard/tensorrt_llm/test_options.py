"""--trtllm-options: read from a file or inline; unknown names are refused with the nearest known one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.options import FLAG, RESERVED, check_options
from text_generation_shard.yaml_options import MAX_BYTES, read_options

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


def refusal(refuse: Callable[[], object]) -> str:
    """Return the error."""
    with pytest.raises(EngineError) as refused:
        refuse()
    line = str(refused.value)
    assert line.startswith("--trtllm-options: ")
    assert len(line.splitlines()) == 1
    return line


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (YAML, OPTIONS),
        ("{max_num_tokens: 4096}", {"max_num_tokens": 4096}),
        ('{\n\t"max_num_tokens":\t4096\n}', {"max_num_tokens": 4096}),
        # YAML 1.1 reads 9e-1 as a string, JSON as a number.
        ('{"kv_cache_config": {"fraction": 9e-1}}', {"kv_cache_config": {"fraction": 0.9}}),
        ("", {}),
        ("# max_num_tokens: 4096\n", {}),
        ("null\n", {}),
    ],
    ids=["yaml", "flow", "json", "json numbers", "empty", "comment", "null"],
)
def test_yaml_and_json_in_a_file_and_inline(tmp_path: Path, text: str, options: dict[str, object]) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    assert read_options(text, FLAG) == read_options(str(path), FLAG) == options


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- max_num_tokens\n- 4096", ("names with values", "['max_num_tokens', 4096]")),
        ("max_num_tokens: 1\nmax_batch_size: 2\nmax_num_tokens: 3", ("line 3", "'max_num_tokens' is there twice")),
        ("{max_num_tokens: 1, max_num_tokens: 1}", ("line 1", "'max_num_tokens' is there twice")),
        ("kv_cache_config:\n  dtype: fp8\n  dtype: auto", ("line 3", "'dtype' is there twice")),
        ("a:\n- x: 1\n  x: 2", ("line 3", "'x' is there twice")),
        ("1: 2", ("the name 1 is not read as text", "quotes")),
        ("max_num_tokens: 1\non: true", ("the name True is not read as text", "quotes")),
        ("? [a]\n: 1", ("line 1", "unhashable")),
        ("a: {? [b] : 1}", ("unhashable",)),
        ("kv: &kv {dtype: fp8}\nkv_cache_config: *kv", ("line 2", "anchors are not supported")),
        ("kv: *nowhere", ("line 1", "anchors are not supported")),
        ("a: 1\n b: 2", ("line 2", "mapping values are not allowed here")),
        ("{max_num_tokens: 1", ("line 1", "while parsing a flow mapping")),
        ("a: 1\n---\nb: 2", ("expected a single document",)),
        ("a: !!python/object/apply:os.system ['true']", ("line 1", "could not determine a constructor")),
        ("a: \0", ("special characters are not allowed",)),
        ("a: \udc80", ("special characters are not allowed",)),
        ("a: 2026-02-30", ("does not fit its type", "day is out of range")),
        ("a: !!int ''", ("does not fit its type",)),
        ("a: " + "1" * 5000, ("does not fit its type",)),
        ("{a: " + "[" * 4000, ("nested too deeply",)),
    ],
    ids=lambda value: None,
)
def test_malformed_text_is_refused_in_one_line(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    line = refusal(lambda: read_options(text, FLAG))
    for word in words:
        assert word in line
    path = tmp_path / "options.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    in_file = refusal(lambda: read_options(str(path), FLAG))
    assert str(path) in in_file
    if "\udc80" not in text:
        assert in_file.removeprefix(f"--trtllm-options: {path}: ") == line.removeprefix("--trtllm-options: ")


def test_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    path, bad = tmp_path / "options.yaml", tmp_path / "bad"
    bad.write_bytes(b"max_num_tokens: \xff")
    for text, words in (
        (str(path), f"{path}: there is no such file"),
        ("max_num_tokens=4096", "'{max_num_tokens: 4096}'"),
        (str(tmp_path), f"{tmp_path}: Is a directory"),
        ("x" * 5000, ": File name too long"),
        (str(bad), f"{bad}: 'utf-8' codec can't decode byte 0xff in position 16: invalid start byte"),
    ):
        assert words in refusal(lambda text=text: read_options(text, FLAG))  # type: ignore[misc]
    path.write_bytes(b"#" * MAX_BYTES)
    assert read_options(str(path), FLAG) == {}
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    assert f"{path}: is longer than {MAX_BYTES} bytes" in refusal(lambda: read_options(str(path), FLAG))


@given(
    text=st.text(alphabet=st.sampled_from("ab1: \n\t-[]{}&*!#|>'\"%@`,?~<=.é\0"), max_size=30) | st.text(max_size=30)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        options = read_options(text, FLAG)
    except EngineError as refused:
        assert len(str(refused).splitlines()) == 1
    else:
        assert all(isinstance(name, str) for name in options)


# ------------------------------------------------------------------------------------------------------------- checking


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"max_num_token": 1},
            "the installed TensorRT-LLM has no option 'max_num_token', the nearest is max_num_tokens",
        ),
        (
            {"load_formats": 2, "zzz": 1, "kv_cache_config": {"dtyp": 1, "a": 2, "dtype": "fp8"}},
            "the installed TensorRT-LLM has no option 'load_formats', the nearest is load_format (use --load-format); "
            "the installed TensorRT-LLM has no option 'zzz'; "
            "kv_cache_config has no field 'dtyp', the nearest is dtype; kv_cache_config has no field 'a'",
        ),
        ({"a\nb": 1}, "the installed TensorRT-LLM has no option 'a\\nb'"),
        ({"kv_cache_config": {1: 2}}, "kv_cache_config has no field '1'"),
    ],
    ids=lambda value: None,
)
def test_unknown_names_are_refused_with_the_nearest_one(options: dict[str, object], line: str) -> None:
    assert refusal(lambda: check_options(options, KNOWN)) == f"--trtllm-options: {line}"
    check_options(options, None)  # the names are not known


@pytest.mark.parametrize("known", [KNOWN, None], ids=["known", "not known"])
def test_reserved_options_are_refused_with_the_alternative(known: Mapping[str, Collection[str] | None] | None) -> None:
    for name, instead in RESERVED.items():
        line = refusal(lambda name=name: check_options({"max_num_tokens": 1, name: 1}, known))  # type: ignore[misc]
        assert line == f"--trtllm-options: {name} is not set here: {instead}"
    for name, word in (("model", "--model-id"), ("dtype", "--dtype")):
        assert word in RESERVED[name]


def test_values_are_not_checked() -> None:
    check_options({"max_batch_size": "many", "kv_cache_config": {"dtype": [1]}, "cuda_graph_config": "off"}, KNOWN)
