"""Models of transformers in the steps of a GPU, on a CPU: device steps, replaced parts, reference attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from full_grid import full
from model_families import FAMILIES, random_model, tiny_config, write_model

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.build import engine_info
from text_generation_shard.engines.torch.cuda.device_memory import DeviceMemory
from text_generation_shard.engines.torch.cuda.executor import CudaExecutor
from text_generation_shard.engines.torch.cuda.runner import Runner
from text_generation_shard.engines.torch.engine import TorchEngine
from text_generation_shard.engines.torch.huggingface.check import WINDOW, check_model
from text_generation_shard.engines.torch.huggingface.config import read_config
from text_generation_shard.engines.torch.huggingface.load import load_model
from text_generation_shard.engines.torch.huggingface.model import TransformersModel
from text_generation_shard.engines.torch.huggingface.swaps import restorer, swap_parts
from text_generation_shard.engines.torch.kv_cache import CacheShape
from text_generation_shard.engines.torch.ops.reference import ReferenceKernels
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank

CPU = torch.device("cpu")
ALONE = ParallelGroup(TensorParallelRank())
HEAD_DIMS = (64, 128)
"""Wider than the heads of the tiny models, which have to be padded."""


@pytest.fixture
def restored() -> Iterator[list[Callable[[], None]]]:
    """Functions that a test adds here are called at its end: a modeling file is changed for the whole process."""
    restorers: list[Callable[[], None]] = []
    yield restorers
    for restore in restorers:
        restore()


@pytest.mark.parametrize(
    "name",
    ["gpt_oss", *map(full, ("llama", "gemma3_text", "deepseek_v3", "qwen3_moe", "phi", "glm4", "gpt2", "cohere2"))],
)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path, restored: list[Callable[[], None]]) -> None:
    library_model = random_model(tiny_config(name, {**FAMILIES[name].changes, "num_hidden_layers": 2}))
    config = ShardConfig(model_path=write_model(library_model, tmp_path), device="cpu", max_batch_size=6, num_threads=1)
    model_config = read_config(tmp_path)
    info = engine_info(config, model_config, CPU, None)
    model = TransformersModel(load_model(config, model_config, ALONE, CPU, torch.float32), HEAD_DIMS)

    def executor() -> CudaExecutor:
        kernels = ReferenceKernels(*model.rules[0])
        shape = CacheShape(tuple(model.layers), CPU, torch.float32)
        runner = Runner(model, kernels, ALONE, shape, info.max_slots, info.max_sequence_length)
        return CudaExecutor(runner, DeviceMemory(CPU, 0.4), ALONE, shape, info.max_slots)

    restored.append(restorer(model.library))
    check_model(model, model_config.vocab_size, executor, ALONE, (WINDOW,), lambda: swap_parts(model.library))
    model.record()
    assert {layer.head_dim for layer in model.layers} == {64}
    engine = TorchEngine(info, executor())
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=1024)))
    prompts = [tuple(torch.randint(3, 128, (length,)).tolist()) for length in (30, 7)]
    # The last token of the first is computed alone.
    streams = [driver.admit(prompt, new, chunk=24) for prompt, new in zip(prompts, (5, 4), strict=True)]
    driver.run()
    for prompt, stream in zip(prompts, streams, strict=True):
        with torch.inference_mode():
            logits = library_model(torch.tensor([[*prompt, *stream.tokens]]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == stream.tokens
