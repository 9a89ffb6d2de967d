"""Descriptions of model, server and tokenizer for a gateway."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_proto.values import GrammarKind
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.echo import EchoEngine
from text_generation_shard.gateway.describe import (
    NoTokenizer,
    archive_chunks,
    build_archive,
    model_info,
    server_info,
)

CONFIG = '{"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}'


def test_model_info_combines_engine_and_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(CONFIG)
    config = ShardConfig(
        model_path=str(tmp_path), model_id="some/model", max_batch_size=7, echo_max_sequence_length=100
    )
    engine = EchoEngine.build(config)
    assert GrammarKind.REGEX in engine.info.grammar_kinds
    assert model_info(engine.info, tmp_path) == pb.GetModelInfoResponse(
        model_id="some/model",
        max_input_len=99,
        max_seq_len=100,
        max_batch_size=7,
        vocab_size=1 << 20,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        supported_features=["guided_decoding", "stop_strings"],
    )
    engine.close()


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ('{"text_config": {"hidden_size": 8}}', (8, 0, 0)),
        ('{"version": "1.2.1", "pretrained_config": {"hidden_size": 8}, "build_config": {}}', (8, 0, 0)),
        *((config, (0, 0, 0)) for config in (None, "{", "[]", '{"hidden_size": "wide"}', '{"hidden_size": -1}')),
    ],
)
def test_sizes_come_from_config_json(tmp_path: Path, config: str | None, sizes: tuple[int, int, int]) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    info = model_info(EchoEngine.build(ShardConfig()).info, tmp_path)
    assert (info.hidden_size, info.num_layers, info.num_heads) == sizes
    assert list(info.supported_features) == []


def test_server_info() -> None:
    info = replace(EchoEngine.build(ShardConfig()).info, pipeline_parallel=3, context_parallel=2)
    assert server_info(info, 12) == pb.GetServerInfoResponse(
        version=version("text-generation-trtllm"),
        backend="tensorrt-llm",
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        context_parallel_size=2,
        world_size=12,
    )


def test_the_archive_has_only_tokenizer_files_and_is_reproducible(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for name in ("tokenizer_config.json", "chat_template.jinja", "config.json", "model.safetensors", "secret.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "vocab.json").write_bytes(os.urandom(200_000))  # several chunks
    data = build_archive(tmp_path)
    os.utime(tmp_path / "vocab.json", (0, 0))
    assert build_archive(tmp_path) == data
    chunks = list(archive_chunks(data))
    assert b"".join(chunk.data for chunk in chunks) == data
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    assert len(chunks) > 2
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
        assert archive.namelist() == names
        assert archive.testzip() is None
        assert archive.read("tokenizer.json") == (tmp_path / "tokenizer.json").read_bytes()


def test_without_a_tokenizer_there_is_no_archive(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(NoTokenizer, match="the model folder has no tokenizer"):
            build_archive(folder)
