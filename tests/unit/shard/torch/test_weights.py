"""Loading of checkpoints, complete and broken."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from full_grid import full
from safetensors.torch import save_file
from structlog.testing import capture_logs
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.weights.load import fill_dummy, load_weights
from text_generation_shard.engines.torch.weights.parameter import PackedSource, ParameterShard
from text_generation_shard.engines.torch.weights.quantization.formats.integers import unpacked

TENSORS = {"a.weight": torch.arange(12.0).view(4, 3), "b.weight": torch.arange(3.0), "not.wanted": torch.ones(1)}
FILE = "model.safetensors"


def parameters() -> dict[str, Tensor]:
    fused = torch.zeros(6, 3, dtype=torch.bfloat16)
    return {"a.weight": fused[:4], "b.weight": torch.zeros(3)}


def refusal(folder: Path, filled: dict[str, Tensor | ParameterShard] | None = None) -> str:
    with pytest.raises(EngineError) as caught:
        load_weights(folder, filled or parameters())
    message = str(caught.value)
    assert "\n" not in message
    return message


INDEX = '{"weight_map": {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}}'


def write_sharded(folder: Path, index: str = INDEX) -> None:
    """Write a checkpoint of two files and their index."""
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "one.safetensors")
    save_file({"b.weight": TENSORS["b.weight"]}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize("with_index", [False, True])
def test_tensors_are_loaded_into_fused_tensors_of_another_dtype(tmp_path: Path, with_index: bool) -> None:
    if with_index:
        write_sharded(tmp_path)
    else:
        save_file(TENSORS, tmp_path / FILE)
    filled = parameters()
    with capture_logs() as logs:
        load_weights(tmp_path, filled)
    for name, tensor in filled.items():
        assert torch.equal(tensor.float(), TENSORS[name]), name
    assert [(line["event"], line["gib"]) for line in logs] == [("weights loaded", 0.0)]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        *((text, "is not a safetensors index") for text in ("{", "{}", '{"weight_map": 3}')),
        (INDEX.replace("two", "three"), "names three.safetensors, which does not exist"),
        (INDEX.replace("two", "one"), "one.safetensors cannot be read"),  # the tensor is not in the file
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    write_sharded(tmp_path, index)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b.weight": None}, "no tensor b.weight"),
        ({"b.weight": torch.ones(4)}, "b.weight has shape [4], config.json says [3]"),
        ({"b.weight": torch.ones(3, dtype=torch.int8)}, "a quantized checkpoint"),
        ({"b.weight": torch.ones(3).to(torch.float8_e4m3fn)}, "a quantized checkpoint"),
    ],
    ids=["missing", "shape", "int8", "FP8"],
)
def test_an_unusable_tensor_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    tensors = {name: tensor for name, tensor in (TENSORS | changes).items() if tensor is not None}
    save_file(tensors, tmp_path / FILE)
    filled = parameters()
    assert message in refusal(tmp_path, filled)
    assert filled["a.weight"].eq(0).all()


def test_a_checkpoint_that_differs_from_its_config_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / FILE)
    shard = ParameterShard(torch.zeros(4, 3), (8, 3), (0, 0))
    assert "a.weight has shape [4, 3], config.json says [8, 3]" in refusal(tmp_path, {"a.weight": shard})
    fp8 = torch.zeros(4, 3).to(torch.float8_e4m3fn)
    assert "a.weight is float32, config.json says float8_e4m3fn" in refusal(tmp_path, {"a.weight": fp8})


@pytest.mark.parametrize("keep", [0, 5, 100, -4])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    save_file(TENSORS, tmp_path / FILE)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:keep])
    assert "cannot be read, is it complete?" in refusal(tmp_path)


@pytest.mark.parametrize(("private", "file", "folder"), [(FILE, 0o600, 0o755), full("", 0o644, 0o711)])
def test_a_file_or_folder_that_only_its_owner_may_read_is_named_so(private: str, file: int, folder: int) -> None:
    program = """
        import os, sys
        from pathlib import Path
        from text_generation_shard.engines.torch.weights.load import load_weights
        if os.getuid() == 0:
            os.setgroups([]), os.setgid(65534), os.setuid(65534)
        load_weights(Path(sys.argv[1]), {})
    """
    with tempfile.TemporaryDirectory() as name:  # every user can enter /tmp
        save_file(TENSORS, Path(name, FILE))
        owner = 0o777 if os.getuid() == 0 else 0o377  # not even the owner, where that is the user of the test
        Path(name, FILE).chmod(file & owner)
        Path(name).chmod(folder & owner)
        command = [sys.executable, "-c", textwrap.dedent(program), name]
        error = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False).stderr
    assert error.endswith(f"EngineError: {Path(name, private)} cannot be read: Permission denied\n")


def test_a_folder_without_safetensors_is_refused_and_pickles_are_never_opened(tmp_path: Path) -> None:
    assert "has no *.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert "only pickled weights, which are never loaded" in refusal(tmp_path)
    (tmp_path / "model.gguf").touch()
    assert f"only GGUF, which is not read: text-generation-launcher convert {tmp_path}/model.gguf FOLDER" in refusal(
        tmp_path
    )


def test_a_shard_takes_only_its_rows_and_columns(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / FILE)
    fused = torch.zeros(2, 2)
    a, b = ParameterShard(fused, (4, 3), (2, 1)), ParameterShard(fused[0, :1], (3,), (2,))
    load_weights(tmp_path, {"a.weight": a, "b.weight": b})
    assert fused.tolist() == [[2.0, 8.0], [10.0, 11.0]]


def test_a_zero_dimensional_tensor_is_loaded_as_one_element(tmp_path: Path) -> None:
    save_file({"a.input_scale": torch.tensor(3.0)}, tmp_path / FILE)
    scales = torch.zeros(2)
    load_weights(tmp_path, {"a.input_scale": scales[1:]})
    assert scales.tolist() == [0.0, 3.0]


def test_dummy_weights_are_the_same_every_time_and_in_shards() -> None:
    first, second = ({"x.weight": torch.empty(40, 40), "y_norm.weight": torch.empty(5)} for _ in range(2))
    fill_dummy(first)
    fill_dummy(second)
    assert torch.equal(first["x.weight"], second["x.weight"])
    assert first["x.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first["y_norm.weight"], torch.ones(5))
    shard = torch.empty(3, 2)
    fill_dummy({"x.weight": ParameterShard(shard, (40, 40), (4, 1))})
    assert torch.equal(shard, first["x.weight"][4:7, 1:3])


def test_dummy_codes_times_their_scale_have_the_size_of_dense_weights() -> None:
    source = PackedSource("x.weight", (64, 512), lambda tensors, rows: tensors["weight"][rows], spread=4.76)
    words, scales = torch.empty(64, 64, dtype=torch.int32), torch.empty(64, 4)
    fill_dummy(
        {
            "x.weight": ParameterShard(words, (64, 64), (0, 0), packed=source),
            "x.weight_scale": ParameterShard(scales, (64, 4), (0, 0), packed=source),
        }
    )
    weights = (unpacked(words, 4, 1).float() - 8) * scales.repeat_interleave(128, 1)
    assert weights.std() == pytest.approx(0.02, rel=0.05)
    assert abs(weights.mean()) < 0.003
