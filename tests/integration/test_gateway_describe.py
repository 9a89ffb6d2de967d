"""What a gateway learns of a model and its server before it sends the first request."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest
from byte_tokenizer import write_tokenizer
from gateway_server import Gateway, echo, serve_gateway
from tokenizers import Tokenizer

from text_generation_proto.gateway import common_pb2
from text_generation_proto.gateway import trtllm_service_pb2 as pb


async def test_the_model_is_described_as_the_engine_and_its_folder_say(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = echo(model_path=str(tmp_path), model_id="some/model", max_batch_size=7, echo_max_sequence_length=100)
    async with serve_gateway(engine, tmp_path, model=tmp_path) as gateway:
        info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info == pb.GetModelInfoResponse(
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


@pytest.mark.parametrize(
    "config",
    [
        '{"text_config": {"hidden_size": 8}}',
        '{"version": "1.2.1", "pretrained_config": {"hidden_size": 8}, "build_config": {}}',
    ],
)
async def test_the_models_size_is_found_where_its_folder_keeps_it(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    async with serve_gateway(echo(), tmp_path, model=tmp_path) as gateway:
        assert (await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())).hidden_size == 8


@pytest.mark.parametrize("config", [None, "{", "[]", '{"hidden_size": "wide"}', '{"hidden_size": -1}'])
async def test_a_model_whose_folder_says_nothing_has_no_size(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    async with serve_gateway(echo(), tmp_path, model=tmp_path) as gateway:
        info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.hidden_size, info.num_layers, info.num_heads) == (0, 0, 0)
    assert list(info.supported_features) == []


async def test_the_server_says_what_it_is(tmp_path: Path) -> None:
    async with serve_gateway(echo(), tmp_path) as gateway:
        info = await gateway.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info == pb.GetServerInfoResponse(
        version=version("text-generation-trtllm"),
        backend="tensorrt-llm",
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        context_parallel_size=1,
        world_size=2,
    )


async def bundle(gateway: Gateway) -> bytes:
    """The archive, read and checked as a gateway does."""
    data, digests = b"", []
    async for chunk in gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest()):
        data += chunk.data
        digests.append(chunk.sha256)
    assert digests[-1] == hashlib.sha256(data).hexdigest()
    assert set(digests[:-1]) <= {""}
    return data


async def test_the_tokenizers_files_and_no_others_are_sent(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    tokenizer = write_tokenizer(model)
    for name in ("tokenizer_config.json", "chat_template.jinja", "config.json", "model.safetensors", "secret.txt"):
        (model / name).write_text(name)
    (model / "vocab.json").write_bytes(os.urandom(200_000))  # so that it takes several pieces
    async with serve_gateway(echo(), tmp_path, model=model) as gateway:
        data = await bundle(gateway)
        assert await bundle(gateway) == data
    async with serve_gateway(echo(), tmp_path, model=model) as gateway:
        assert await bundle(gateway) == data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == [
            "chat_template.jinja",
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.json",
        ]
        assert archive.testzip() is None
        sent = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    assert sent.encode("true").ids == tokenizer.encode("true").ids


async def test_without_a_tokenizer_there_is_nothing_to_send(tmp_path: Path) -> None:
    async with serve_gateway(echo(), tmp_path) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await bundle(gateway)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.value.details() == "the model folder has no tokenizer.json"
