"""`text-generation-launcher convert`, with files written by the format's own library."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_driver import Driver
from tokenizers import Tokenizer
from transformers import Gemma2Config, Gemma2ForCausalLM

from text_generation_common.exit_codes import ExitCode
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.gguf import complete, main

HIDDEN, WORDS = 64, ["<unk>", "a", "b", "ab", "c"]
LAYER = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, HIDDEN),
    "attn_v": (HIDDEN, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (96, HIDDEN),
    "ffn_up": (96, HIDDEN),
    "ffn_down": (HIDDEN, 96),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}


def write(
    path: Path,
    architecture: str = "llama",
    left_out: Sequence[str] = (),
    *,
    feed_forward: int = 96,
    scaling: Mapping[str, Any] | None = None,
    more: Mapping[str, Sequence[float]] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(WORDS))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    for key, value in (scaling or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{architecture}.rope.scaling.{key}", value)
    for name, values in (more or {}).items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    shapes = {f"blk.0.{name}": shape for name, shape in LAYER.items()}
    shapes |= {"token_embd": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,), "output": (len(WORDS), HIDDEN)}
    random = np.random.default_rng(1)
    for name, shape in shapes.items():
        if name not in left_out:
            writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_file_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"
    assert main([str(write(tmp_path / "tiny.gguf")), str(folder)]) == ExitCode.STOPPED
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == "{{ messages[0].content }}"
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("abc").ids == [3, 4]
    engine = build_engine(ShardConfig(model_path=str(folder), device="cpu", max_batch_size=2, engine="torch"))
    driver = Driver(engine, engine.warm_up(WarmUpLimits()))
    sequence = driver.admit((3, 4), 4)
    driver.run()
    assert len(sequence.tokens) == 4


def test_a_tensor_of_another_shape_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "tiny.gguf", feed_forward=100)
    assert main([str(path), str(tmp_path / "model")]) == ExitCode.FAILED
    assert "_proj.weight has shape [" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("architecture", "left_out", "words"),
    [
        ("starlight", [], "GGUF model with architecture starlight is not supported"),
        ("llama", ["blk.0.ffn_up"], "has no tensor model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_file_that_cannot_be_converted_leaves_nothing(
    architecture: str, left_out: Sequence[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "tiny.gguf", architecture, left_out)
    assert main([str(path), str(tmp_path / "model")]) == ExitCode.FAILED
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [path]


LLAMA3_FACTORS = (1, 1, 1, 1, 1, 1, 4.6815, 8)
"""The factors of 16 dimensions."""


@pytest.mark.parametrize(
    ("scaling", "factors", "expected"),
    [
        ({"type": "none"}, None, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, None, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
            None,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        ({}, LLAMA3_FACTORS, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}),
    ],
)
def test_a_scaled_rotation_is_converted(
    scaling: dict[str, Any], factors: Sequence[float] | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    """The library reads nothing of it."""
    folder, more = tmp_path / "model", {} if factors is None else {"rope_freqs.weight": factors}
    assert main([str(write(tmp_path / "tiny.gguf", scaling=scaling, more=more)), str(folder)]) == ExitCode.STOPPED
    assert expected.items() <= json.loads((folder / "config.json").read_text())["rope_parameters"].items()
    (rope,) = read_model_config(folder).ropes
    assert rope.type == expected["rope_type"]


@pytest.mark.parametrize(
    ("scaling", "more", "words"),
    [
        ({"type": "longrope"}, {}, "the library does not read the factors of its rotation"),
        ({}, {"rope_factors_long.weight": [1.0]}, "the library does not read the factors of its rotation"),
        ({}, {"rope_freqs.weight": [1.0] * 7 + [8.0]}, "its rotation has other factors than that of Llama 3"),
        ({}, {"rope_freqs.weight": [math.nan] * 8}, "its rotation has other factors than that of Llama 3"),
        ({}, {"blk.0.attn_q.bias": [1.0] * HIDDEN}, "the library does not read tensor blk.0.attn_q.bias"),
    ],
)
def test_what_the_library_does_not_read_is_refused(
    scaling: dict[str, Any],
    more: dict[str, Sequence[float]],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "tiny.gguf", scaling=scaling, more=more)
    assert main([str(path), str(tmp_path / "model")]) == ExitCode.FAILED
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_the_scale_of_attention_of_large_gemmas_is_that_of_llama_cpp(tmp_path: Path) -> None:
    """The file does not tell it, and the library has that of the small ones."""
    shape = {"hidden_size": 96, "intermediate_size": 8, "vocab_size": 8, "num_attention_heads": 4, "head_dim": 8}
    for layers, scalar in ((46, 24), (42, 256)):
        with torch.device("meta"):
            model = Gemma2ForCausalLM(Gemma2Config(**shape, num_hidden_layers=layers))
        complete(model, gguf.GGUFReader(write(tmp_path / "tiny.gguf")))
        assert model.config.query_pre_attn_scalar == scalar


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = write(tmp_path / "tiny.gguf")
    assert main([str(path), str(tmp_path / "model")]) == ExitCode.FAILED
    assert "pip install --upgrade torch transformers accelerate gguf" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.full
def test_the_command_refuses_other_files_and_folders_in_one_line(tmp_path: Path) -> None:
    (text := tmp_path / "text.gguf").write_text("text", encoding="utf-8")
    (full := tmp_path / "full").mkdir()
    (full / "file").touch()
    gguf_file = write(tmp_path / "tiny.gguf")
    for arguments, code, words in (
        ([], 2, "usage: text-generation-launcher convert FILE.gguf FOLDER"),
        (["--help"], 0, "usage: text-generation-launcher convert FILE.gguf FOLDER"),
        ([tmp_path / "none", tmp_path / "model"], 1, "none: No such file or directory"),
        ([text, tmp_path / "model"], 1, "text.gguf is not a GGUF file"),
        ([gguf_file, full], 1, "full is not empty"),
        ([gguf_file, text], 1, "text.gguf is not a folder"),
    ):
        command = [sys.executable, "-m", "text_generation_launcher", "convert", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert words in done.stderr
