"""`text-generation-launcher convert`, with files written by the format's own library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from engine_driver import Driver
from tokenizers import Tokenizer

from text_generation_common.exit_codes import ExitCode
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.gguf import main

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


def write(path: Path, architecture: str = "llama", left_out: Sequence[str] = ()) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
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
