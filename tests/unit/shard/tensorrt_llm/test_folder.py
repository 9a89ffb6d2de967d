"""The kind of a model folder and its values are read without an import of TensorRT-LLM."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_folders import CHECKPOINT, ENGINE, HUGGING_FACE, RANKS, engine, fill, mapping, nothing_imported
from standin import model_folder

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.engine_folder import CompiledEngine, check_engine
from text_generation_shard.engines.tensorrt_llm.folder import inspect_folder, read_hugging_face_model
from text_generation_shard.json_object import JsonObject


@pytest.fixture(autouse=True)
def _nothing_is_imported(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_imported(tmp_path_factory.mktemp("poison"), monkeypatch):
        yield


def check(folder: Path, world_size: int = 2, installed: str | None = "1.2.1") -> CompiledEngine | None:
    """Return the compiled engines in a folder; None if it has a Hugging Face checkpoint."""
    found = inspect_folder(folder)
    if not isinstance(found, CompiledEngine):
        assert found.path == folder / "config.json"
        return None
    check_engine(folder, found, world_size=world_size, installed=installed)
    return found


# ------------------------------------------------------------------------------------------------------- valid folders


def test_compiled_engines(tmp_path: Path) -> None:
    generation = json.dumps({"eos_token_id": [128001, 128008, 128009]}).encode()
    built = check(fill(tmp_path, ENGINE, RANKS | {"generation_config.json": generation}))
    assert built is not None
    assert (built.version, built.dtype, built.vocab_size) == ("1.2.1", "bfloat16", 128256)
    assert (built.world_size, built.tp_size, built.pp_size, built.cp_size) == (2, 2, 1, 1)
    assert (built.max_sequence_length, built.max_batch_size, built.max_num_tokens) == (4096, 64, 8192)
    assert (built.tokens_per_block, built.paged_context_fmha, built.gather_generation_logits) == (64, True, True)
    assert built.eos_token_ids == (128001, 128008, 128009)


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [
        (..., None, ()),
        (7, None, (7,)),
        (7, {}, (7,)),
        (7, {"eos_token_id": None}, (7,)),
        (7, {"eos_token_id": 2}, (2,)),
        ([7, 8], {"eos_token_id": [2, 3]}, (2, 3)),
    ],
    ids=str,
)
def test_eos_tokens_of_compiled_engines(
    tmp_path: Path, own: object, generation: dict[str, Any] | None, ids: tuple[int, ...]
) -> None:
    config = engine() if own is ... else engine(pretrained_config__eos_token_id=own)
    files = {} if generation is None else {"generation_config.json": json.dumps(generation).encode()}
    built = check(fill(tmp_path, config, RANKS | files))
    assert built is not None
    assert built.eos_token_ids == ids


@pytest.mark.parametrize(
    ("built_by", "installed"),
    [
        *(("1.2.1", installed) for installed in ("1.2.1", "1.2.0", "1.2.0rc3", "1.2.1+cu130", "1.2", "unknown")),
        ("1.1.0", None),
    ],
)
def test_engines_run_on_the_version_that_built_them(tmp_path: Path, built_by: str, installed: str | None) -> None:
    folder = fill(tmp_path, engine(version=built_by), RANKS)
    assert check(folder, installed=installed) is not None


@pytest.mark.parametrize(
    "config",
    [
        engine(build_config__kv_cache_type="PAGED"),
        mapping(world_size=2, tp_size=1, pp_size=2),
        mapping(world_size=2, tp_size=1, pp_size=1, cp_size=2),
        engine(build_config__gather_context_logits=..., build_config__gather_generation_logits=...),
        ENGINE | {"architectures": ["LlamaForCausalLM"]},
    ],
    ids=lambda config: None,
)
def test_unusual_builds_are_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    assert check(fill(tmp_path, config, RANKS)) is not None


@pytest.mark.parametrize("extra", [{}, {"quantization_config": {"quant_method": "fp8"}}, {"build_config": {}}], ids=str)
def test_hugging_face_folders(tmp_path: Path, extra: dict[str, Any]) -> None:
    assert check(fill(tmp_path, HUGGING_FACE | extra, {"model.safetensors": b"weights"})) is None


@pytest.mark.parametrize(
    ("change", "generation", "expected"),
    [
        ({}, None, ("llama", "bfloat16", 4096, 2048, (2,))),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": None}, ("llama", "bfloat16", 4096, 2048, (2, 3))),
        ({}, {"eos_token_id": [7, 8]}, ("llama", "bfloat16", 4096, 2048, (7, 8))),
        ({"dtype": None, "torch_dtype": "float16"}, None, ("llama", "float16", 4096, 2048, (2,))),
        ({"max_position_embeddings": None, "n_positions": 512}, None, ("llama", "bfloat16", 4096, 512, (2,))),
        (
            {"model_type": "mllama", "text_config": {"vocab_size": 99, "max_position_embeddings": 64}},
            None,
            ("mllama", "bfloat16", 99, 64, (2,)),
        ),
    ],
    ids=["config", "no eos in generation_config", "eos in generation_config", "old dtype", "old length", "multimodal"],
)
def test_hugging_face_models(
    tmp_path: Path, change: dict[str, object], generation: object, expected: tuple[object, ...]
) -> None:
    model_folder(tmp_path, **change)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    model = read_hugging_face_model(JsonObject.read(tmp_path))
    found = (model.model_type, model.dtype, model.vocab_size, model.max_sequence_length, model.eos_token_ids)
    assert found == expected


UNKNOWN_LENGTH = (
    "does not say how long a sequence may be (max_position_embeddings): give --trtllm-options 'max_seq_len: …'"
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"max_position_embeddings": None}, UNKNOWN_LENGTH),
        ({"vocab_size": True}, "does not say how large the vocabulary is (vocab_size)"),
    ],
    ids=["length", "vocabulary"],
)
def test_hugging_face_models_without_sizes_are_refused(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    with pytest.raises(EngineError) as refusal:
        read_hugging_face_model(JsonObject.read(model_folder(tmp_path, **change)))
    assert str(refusal.value) == f"{tmp_path / 'config.json'} {problem}"


def test_a_length_that_no_file_names_is_that_of_the_class_or_the_operators(tmp_path: Path) -> None:
    """google/gemma-3-4b-it and its kin leave both sizes to the class Gemma3TextConfig."""
    config = JsonObject.read(
        fill(
            tmp_path / "gemma",
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "model_type": "gemma3",
                "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2},
            },
            {},
        )
    )
    model = read_hugging_face_model(config)
    assert (model.max_sequence_length, model.vocab_size) == (131072, 262208)
    unknown = JsonObject.read(model_folder(tmp_path / "unknown", model_type="unheard-of", max_position_embeddings=None))
    assert read_hugging_face_model(unknown, {"max_seq_len": 512}).max_sequence_length == 512


# --------------------------------------------------------------------------------------------------------- odd folders


def test_paths_without_a_model_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere does not exist"):
        inspect_folder(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"{}")
    with pytest.raises(EngineError, match="file is a file: name the folder"):
        inspect_folder(tmp_path / "file")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(EngineError, match=r"config\.json cannot be read: Is a directory"):
        inspect_folder(tmp_path)
    with pytest.raises(EngineError, match="cannot be read"):
        inspect_folder(Path("/\0"))


def test_a_rank_that_is_a_folder_is_missing(tmp_path: Path) -> None:
    folder = fill(tmp_path, ENGINE, {"rank0.engine": b"plan"})
    (folder / "rank1.engine").mkdir()
    with pytest.raises(EngineError, match=r"rank1\.engine is missing"):
        check(folder)


@pytest.mark.parametrize(
    ("installed", "built", "runs"),
    [
        ("10.13.3.9.post1", (10, 13, 3, 9), True),
        ("10.13.3", (10, 13, 3, 9), True),
        ("10.13.3.9", (10, 14, 1, 48), False),
        ("11.4.0.106", (10, 13, 3, 9), False),
        (None, (8, 6, 1, 2), True),
    ],
)
def test_engines_of_another_tensorrt_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None, built: tuple[int, ...], runs: bool
) -> None:
    plan = b"ftrt" + bytes(20) + bytes(built) + b"the engine"
    folder = fill(tmp_path, ENGINE, {"rank0.engine": plan, "rank1.engine": plan})
    if installed is not None:
        metadata = tmp_path / "packages" / "tensorrt-1.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {installed}\n")
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    with nullcontext() if runs else pytest.raises(EngineError) as error:
        check(folder)
    if error is not None:
        line = f"TensorRT {'.'.join(map(str, built))} built it, and {installed} is installed, which cannot run it"
        assert f"rank0.engine: {line}: build the engines again with trtllm-build" in str(error.value)


def test_the_search_for_ranks_ends_at_the_first_missing_one(tmp_path: Path) -> None:
    many = 2**31 - 1
    folder = fill(tmp_path, mapping(world_size=many, tp_size=many), RANKS)
    with pytest.raises(EngineError, match=r"rank2\.engine is missing"):
        check(folder, world_size=many)


# ------------------------------------------------------------------------------------------------------- random damage


def keys_in(config: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in config.items():
        found.append((*above, key))
        if isinstance(value, dict):
            found += keys_in(value, (*above, key))
    return found


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, 3, 2**31 - 1, 2**31, 2**64])
    | st.floats()
    | st.text(max_size=40)
    | st.sampled_from(["1.2.1", "0.9", "paged", "CONTINUOUS", "bfloat16", "\n", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
configs = st.sampled_from([ENGINE, HUGGING_FACE, CHECKPOINT])


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """A config with some values replaced or removed."""
    config: dict[str, Any] = copy.deepcopy(draw(configs))
    for _ in range(draw(st.integers(1, 3))):
        keys = draw(st.sampled_from(keys_in(config) or [("version",)]))
        here = config
        for key in keys[:-1]:
            here = here[key]
        if draw(st.booleans()) and keys[-1] in here:
            del here[keys[-1]]
        else:
            here[keys[-1]] = draw(values)
    return config


cut_off = st.binary(max_size=200) | st.integers(0, 1200).map(lambda end: json.dumps(ENGINE).encode()[:end])
any_json = values.map(lambda value: json.dumps(value).encode())


@given(config=damaged() | cut_off | any_json)
def test_a_damaged_folder_is_refused_in_one_line_or_accepted(config: object) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = fill(Path(path), config, RANKS | {"rank0.safetensors": b"weights"})
        try:
            check(folder)
        except EngineError as refusal:
            assert len(str(refusal).splitlines()) == 1
