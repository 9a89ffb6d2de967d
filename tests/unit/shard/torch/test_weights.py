"""Checkpoints as they come, whole and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs
from tiny_checkpoint import dequantized, quantized
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.weights import LoadingProgress, ParameterShard, fill_dummy, load_weights

TENSORS = {"a.weight": torch.arange(12.0).view(4, 3), "b.weight": torch.arange(3.0), "not.wanted": torch.ones(1)}


def targets() -> dict[str, Tensor]:
    fused = torch.zeros(6, 3, dtype=torch.bfloat16)
    return {"a.weight": fused[:4], "b.weight": torch.zeros(3)}


def assert_filled(filled: dict[str, Tensor]) -> None:
    for name, tensor in filled.items():
        assert torch.equal(tensor.float(), TENSORS[name]), name


def refusal(folder: Path) -> str:
    with pytest.raises(EngineError) as caught:
        load_weights(folder, targets())
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_one_file_is_read_into_parts_of_fused_tensors_of_another_dtype(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    filled = targets()
    load_weights(tmp_path, filled)
    assert_filled(filled)


def sharded(folder: Path) -> Path:
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "one.safetensors")
    save_file({"b.weight": TENSORS["b.weight"]}, folder / "two.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}}))
    return index


def test_an_index_says_which_file_holds_what(tmp_path: Path) -> None:
    sharded(tmp_path)
    filled = targets()
    load_weights(tmp_path, filled)
    assert_filled(filled)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    assert "names two.safetensors, which does not exist" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    sharded(tmp_path).write_text(text)
    assert "is not a safetensors index" in refusal(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / "model.safetensors")
    assert "no tensor b.weight" in refusal(tmp_path)


def test_a_tensor_that_the_index_promises_and_the_file_lacks_is_refused(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    index.write_text(index.read_text().replace("two", "one"))
    assert "one.safetensors cannot be read" in refusal(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS | {"b.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert "b.weight has shape [4], config.json says [3]" in refusal(tmp_path)


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    save_file(TENSORS | {"b.weight": torch.ones(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert "a quantized checkpoint" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -4])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    assert "cannot be read, is it complete?" in refusal(tmp_path)


def test_pickled_weights_are_refused_and_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert "only pickled weights, which are never loaded" in refusal(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "has no *.safetensors" in refusal(tmp_path)


def test_dummy_weights_are_the_same_every_time() -> None:
    first, second = ({"x.weight": torch.empty(40, 40), "y_norm.weight": torch.empty(5)} for _ in range(2))
    fill_dummy(first)
    fill_dummy(second)
    assert torch.equal(first["x.weight"], second["x.weight"])
    assert first["x.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first["y_norm.weight"], torch.ones(5))


def test_a_part_takes_its_rows_and_columns_only(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    fused = torch.zeros(2, 2)
    load_weights(
        tmp_path,
        {"a.weight": ParameterShard(fused, (4, 3), (2, 1)), "b.weight": ParameterShard(fused[0, :1], (3,), (2,))},
    )
    assert fused.tolist() == [[2.0, 8.0], [10.0, 11.0]]


def test_a_part_of_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"a\.weight has shape \[4, 3\], config\.json says \[8, 3\]"):
        load_weights(tmp_path, {"a.weight": ParameterShard(torch.zeros(4, 3), (8, 3), (0, 0))})


def test_nothing_is_written_when_anything_is_wrong(tmp_path: Path) -> None:
    save_file(TENSORS | {"b.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    filled = targets()
    with pytest.raises(EngineError):
        load_weights(tmp_path, filled)
    assert filled["a.weight"].eq(0).all()


@pytest.mark.parametrize("per_row", [False, True])
def test_fp8_weights_are_multiplied_by_their_scales(tmp_path: Path, per_row: bool) -> None:
    tensors = quantized({"x.q_proj.weight": torch.randn(6, 4)}, per_row=per_row)
    save_file(tensors, tmp_path / "model.safetensors")
    whole, corner = torch.zeros(6, 4), torch.zeros(2, 3, dtype=torch.bfloat16)
    load_weights(tmp_path, {"x.q_proj.weight": whole})
    load_weights(tmp_path, {"x.q_proj.weight": ParameterShard(corner, (6, 4), (3, 1))})
    expected = dequantized(tensors)["x.q_proj.weight"]
    assert torch.equal(whole, expected)
    assert torch.equal(corner, expected[3:5, 1:4].to(torch.bfloat16))


def test_fp8_weights_without_a_usable_scale_are_refused(tmp_path: Path) -> None:
    weight = torch.ones(4, 3).to(torch.float8_e4m3fn)
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    filled = {"a.weight": torch.zeros(4, 3)}
    with pytest.raises(EngineError, match="a quantized checkpoint"):
        load_weights(tmp_path, filled)
    save_file({"a.weight": weight, "a.weight_scale": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"a\.weight_scale has shape \[2, 3\]"):
        load_weights(tmp_path, filled)


def test_weights_that_should_be_fp8_and_are_not_are_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"a\.weight is float32, config\.json says float8_e4m3fn"):
        load_weights(tmp_path, {"a.weight": torch.zeros(4, 3).to(torch.float8_e4m3fn)})


def test_a_number_of_no_dimensions_counts_as_one_of_one(tmp_path: Path) -> None:
    save_file({"a.input_scale": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    scales = torch.zeros(2)
    load_weights(tmp_path, {"a.input_scale": scales[1:]})
    assert scales.tolist() == [0.0, 3.0]


def test_loading_ends_with_a_line_in_the_log(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with capture_logs() as logs:
        load_weights(tmp_path, targets())
    (line,) = logs
    assert (line["event"], line["gib"]) == ("weights loaded", 0.0)


def test_progress_is_told_every_five_seconds() -> None:
    now = 100.0
    progress = LoadingProgress(4 << 30, clock=lambda: now)
    with capture_logs() as logs:
        for seconds in (4.9, 0.2, 4.0, 1.0):
            now += seconds
            progress.add(1 << 30)
        progress.end()
    assert [(line["event"], line["gib"]) for line in logs] == [("loading weights", 2.0), ("weights loaded", 4.0)]
    assert (logs[0]["percent"], logs[1]["seconds"]) == (50, 10.1)


def test_dummy_parts_are_parts_of_the_whole() -> None:
    whole, part = torch.empty(8, 6), torch.empty(3, 2)
    fill_dummy({"x.weight": whole})
    fill_dummy({"x.weight": ParameterShard(part, (8, 6), (4, 1))})
    assert torch.equal(part, whole[4:7, 1:3])
