"""The FP8 KV cache on a CPU: its numbers, its scales in a checkpoint, and its refusals."""

from __future__ import annotations

from itertools import chain, product
from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from native_families import LATENT
from reference_kernels import reference_engine
from structlog.testing import capture_logs
from tiny_checkpoint import random_tensors, write_checkpoint
from tiny_transformers import SHAPE, random_model, save
from torch import Tensor
from transformers import YoutuConfig

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import KVCacheDType, ModelImpl, ShardConfig
from text_generation_shard.engine import Engine, EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.batch.kv_cache import (
    BLOCK_SIZE,
    FP8_DTYPES,
    CacheShape,
    Fp8Cache,
    LayerShape,
    PagedKVCache,
)
from text_generation_shard.engines.torch.build.fp8_cache import fp8_cache
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank

CPU = torch.device("cpu")
SPACING = {"fp8_e4m3fn": 2.0**-4, "fp8_e5m2": 2.0**-3}
"""The largest relative error of a normal number."""
HEADS = TensorParallelRank().kv_heads(2)


def settings(folder: Path, kv_cache_dtype: KVCacheDType = "fp8_e4m3fn", model_impl: ModelImpl = "auto") -> ShardConfig:
    return ShardConfig(
        model_path=str(folder), device="cpu", max_batch_size=4, kv_cache_dtype=kv_cache_dtype, model_impl=model_impl
    )


@pytest.mark.parametrize("kind", FP8_DTYPES)
def test_numbers_are_rounded_relative_to_the_scale_of_their_head(kind: str) -> None:
    layer = LayerShape(4, 2, 8)
    scales = torch.tensor([[1e-3, 1.0], [30.0, 2e-5]])
    fp8 = Fp8Cache(FP8_DTYPES[kind], {1: scales})
    shape = CacheShape((layer, layer), CPU, torch.float32, fp8=fp8)
    (rounded,) = CacheShape((layer, layer), CPU, torch.bfloat16).block_bytes
    assert shape.block_bytes == (2 * 2 * 2 * 8 * BLOCK_SIZE,) == (rounded // 2,)
    cache = PagedKVCache(shape, [3])
    cache.clear(torch.tensor([[0, 1]]))
    keys_values = (torch.rand(20, 4, 8) + 0.5) * scales.view(4, 1)
    keys_values[3, 1, 2], keys_values[4, 1, 2] = 1e9, torch.nan
    positions = torch.arange(20)
    index = cache.write_index((positions // BLOCK_SIZE).unsqueeze(0), positions % BLOCK_SIZE)
    cache.write(1, index, keys_values)
    read = torch.full((2, 1, 2, 32, 8), torch.nan)
    cache.read(1, cache.read_index(torch.tensor([[0, 1]]), 4), read)
    found = read[:, 0, :, :20].permute(2, 0, 1, 3).flatten(1, 2)
    assert found[3, 1, 2] == torch.finfo(FP8_DTYPES[kind]).max
    assert found[4, 1, 2].isnan()
    assert not read[:, 0, :, 20:].any()
    errors = (found / keys_values - 1).abs()
    errors[3:5, 1, 2] = 0.0
    assert SPACING[kind] / 2 < errors.max() <= SPACING[kind]


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("kv_scale", "kv_scale"),
    ],
    ids=["compressed-tensors", "ModelOpt", "Quark", "AutoFP8"],
)
def test_scales_are_read_from_the_checkpoint(keys: str, values: str, tmp_path: Path) -> None:
    """By tensor in layer 0, by head in layer 1, of which a rank has its own."""
    prefix = "model.layers.{}.self_attn."
    scales = {
        prefix.format(0) + keys: torch.tensor(0.5),
        prefix.format(0) + values: torch.tensor(0.5),
        prefix.format(1) + keys: torch.tensor([2.0, 3.0]).view(2, 1, 1),
        prefix.format(1) + values: torch.tensor([2.0, 3.0]).view(2, 1, 1),
    }
    folder = write_checkpoint(tmp_path, random_tensors() | scales)
    found = fp8_cache(settings(folder), dict.fromkeys(range(2), HEADS), CPU)
    assert found is not None
    assert [found.scales[layer].tolist() for layer in (0, 1)] == [[[0.5, 0.5]] * 2, [[2.0, 3.0]] * 2]
    second = fp8_cache(settings(folder), dict.fromkeys(range(2), TensorParallelRank(1, 2).kv_heads(2)), CPU)
    assert second is not None
    assert second.scales[1].tolist() == [[3.0], [3.0]]
    with capture_logs() as logs:
        assert fp8_cache(settings(folder, "auto"), dict.fromkeys(range(2), HEADS), CPU) is None
    assert [line["event"] for line in logs] == ["the scales of the KV cache are not used"]


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), r"k_scale has 3 scales, not 1 or one for each of 2 heads"),
        (torch.tensor(-1.0), "k_scale has a scale that is not a positive number"),
        (torch.tensor(float("nan")), "k_scale has a scale that is not a positive number"),
    ],
)
def test_invalid_scales_are_refused(scale: Tensor, message: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, random_tensors() | {"model.layers.1.self_attn.k_scale": scale})
    with pytest.raises(EngineError, match=message):
        build_engine(settings(folder))


def test_transformers_does_not_use_scales_and_says_so(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, random_tensors() | {"model.layers.1.self_attn.k_scale": torch.tensor(1.0)})
    with pytest.raises(EngineError, match="--kv-cache-dtype fp8_e4m3fn: the scales of this checkpoint are not served"):
        fp8_cache(settings(folder), {}, CPU)


def test_latent_rows_are_not_stored_in_fp8(tmp_path: Path) -> None:
    folder = Path(save(random_model(YoutuConfig(**SHAPE | LATENT)), tmp_path))
    message = "--kv-cache-dtype fp8_e4m3fn: the latent rows of youtu models are not stored in FP8"
    with pytest.raises(EngineError, match=f"^{message}$"):
        build_engine(settings(folder))


def prompt_scores(engine: Engine) -> Tensor:
    """Return the log-probabilities of the tokens of a prompt, computed in two chunks."""
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=256)))
    stream = driver.admit([(7 * i) % 331 for i in range(60)], 2, prompt_logprobs=True, chunk=40)
    driver.run()
    return torch.tensor([*chain.from_iterable(stream.prompt_logprobs), *stream.logprobs][1:])


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_an_engine_stores_fp8_and_computes_nearly_the_same(model_impl: ModelImpl, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, random_tensors(), {"architectures": ["LlamaForCausalLM"]})
    engines = [build_engine(settings(folder, kind, model_impl)) for kind in ("auto", "fp8_e4m3fn", "fp8_e5m2")]
    assert [engine.info.kv_cache_dtype for engine in engines] == ["", "fp8_e4m3fn", "fp8_e5m2"]
    exact, *scores = [prompt_scores(engine) for engine in engines]
    errors = [float((each - exact).abs().mean()) for each in scores]
    assert 1e-3 < errors[0] < errors[1] < 1.0


def test_a_device_step_stores_and_reads_with_the_same_scales(tmp_path: Path) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([0.02 + layer, 1e-4])
        for layer, name in product((0, 1), ("k_scale", "v_scale"))
    }
    folder = write_checkpoint(tmp_path, random_tensors() | scales)
    on_cpu, on_device = (prompt_scores(build(settings(folder))) for build in (build_engine, reference_engine))
    torch.testing.assert_close(on_device, on_cpu, rtol=1e-4, atol=1e-4)
