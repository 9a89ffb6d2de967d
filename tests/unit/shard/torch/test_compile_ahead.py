"""Kernels compiled ahead: the small model that stands for a large one, and the program that runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tiny_checkpoint import random_tensors, write_checkpoint

from text_generation_shard.engines.torch.build.compile_ahead import PROGRAM, one_of_each_kind
from text_generation_shard.engines.torch.models.native.config import read_model_config

GPT_OSS = {
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
}


def test_the_small_model_has_one_layer_of_each_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    whole = read_model_config(tmp_path)
    small = one_of_each_kind(whole)
    assert len(whole.layers) == 6
    assert [layer.window for layer in small.layers] == [32, None]
    assert small.experts is not None
    assert (len(small.ropes), small.experts.layers) == (2, (True, True))
    assert one_of_each_kind(small) == small


def test_the_program_runs_the_small_model_and_a_draft_model_without_reading_a_weight(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"other": random_tensors()["model.norm.weight"]})
    draft = json.loads((folder / "config.json").read_text())
    draft |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 10, "num_hidden_layers": 1}
    draft["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(draft))
    settings = json.dumps(
        {
            "model_path": str(folder),
            "device": "cpu",
            "max_batch_size": 2,
            "load_format": "dummy",
            "speculator": str(tmp_path / "draft"),
        }
    )
    with subprocess.Popen(
        [sys.executable, "-m", PROGRAM, "0", "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        program.stdin.write(f"{settings}\n")
        program.stdin.flush()
        assert program.wait(timeout=60) == 0
