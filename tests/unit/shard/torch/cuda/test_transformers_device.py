"""Models of transformers in the steps of a GPU, on a CPU: device steps, reference attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from full_grid import full
from model_families import FAMILIES, random_model, tiny_config, write_model
from reference_kernels import ALONE, CPU, ReferenceKernels
from transformers.models.llama.modeling_llama import LlamaAttention

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.batch.kv_cache import CacheShape
from text_generation_shard.engines.torch.build.prepare import engine_info
from text_generation_shard.engines.torch.device.memory import DeviceMemory
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.engine.executor import Executor
from text_generation_shard.engines.torch.engine.worker import TPWorker
from text_generation_shard.engines.torch.layers.device_ops import DeviceOps
from text_generation_shard.engines.torch.layers.ops import Ops
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.models.huggingface.check import WINDOW, check_model
from text_generation_shard.engines.torch.models.huggingface.config import read_config
from text_generation_shard.engines.torch.models.huggingface.find_decoder import find_decoder
from text_generation_shard.engines.torch.models.huggingface.load import load_model
from text_generation_shard.engines.torch.models.huggingface.model import TransformersModel
from text_generation_shard.engines.torch.models.native.decoder import Decoder
from text_generation_shard.engines.torch.runner.device_runner import DeviceRunner

HEAD_DIMS = (64, 128)
"""Wider than the heads of the tiny models, which have to be padded."""


class Served:
    """A tiny random model of a family, and its executors with reference kernels."""

    def __init__(
        self,
        name: str,
        folder: Path,
        head_dims: tuple[int, ...] = (),
        layers: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.library = random_model(tiny_config(name, {**FAMILIES[name].changes, "num_hidden_layers": layers}))
        config = ShardConfig(
            model_path=write_model(self.library, folder), device="cpu", max_batch_size=6, num_threads=1
        )
        self.config = read_config(folder)
        self.info = engine_info(config, self.config, CPU, None)
        self.model = TransformersModel(load_model(config, self.config, ALONE, CPU, dtype), head_dims)

    def check(self) -> None:
        check_model(
            self.model, self.config.vocab_size, self.config.max_sequence_length, self.executor, ALONE, (WINDOW,)
        )
        self.model.record()

    def found_decoder(self) -> Callable[[Ops], Decoder] | None:
        """Search the native decoder, with the precision of a GPU."""
        precision = Precision.of(self.library.config.hidden_size, self.model.dtype)
        return find_decoder(self.model, self.info.max_sequence_length, ALONE, precision)

    def executor(self) -> Executor:
        model, info = self.model, self.info
        kernels = ReferenceKernels(*model.rules[0])
        shape = CacheShape(tuple(model.layers), CPU, model.dtype, state_bytes=model.states.block_bytes)
        served = model.with_ops(DeviceOps(kernels, ALONE, model.dtype))
        runner = DeviceRunner(served, kernels, ALONE, shape, info.max_slots, info.max_sequence_length)
        return Executor(TPWorker(runner, DeviceMemory(CPU, 0.4)), ALONE, runs_ahead=True)

    def check_greedy_tokens(self) -> None:
        engine = TorchEngine(self.info, self.executor())
        driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=1024)))
        prompts = [tuple(torch.randint(3, 128, (length,)).tolist()) for length in (30, 7)]
        # The last token of the first is computed alone.
        streams = [driver.admit(prompt, new, chunk=24) for prompt, new in zip(prompts, (5, 4), strict=True)]
        driver.run()
        for prompt, stream in zip(prompts, streams, strict=True):
            with torch.inference_mode():
                logits = self.library(torch.tensor([[*prompt, *stream.tokens]]), use_cache=False).logits[0]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == stream.tokens


@pytest.mark.parametrize("name", [*map(full, ("gpt_oss", "deepseek_v3", "phi", "gpt2", "cohere2"))])
def test_layers_of_the_library_run_in_the_steps_of_a_gpu(name: str, tmp_path: Path) -> None:
    served = Served(name, tmp_path, HEAD_DIMS)
    served.check()
    assert {layer.head_dim for layer in served.model.layers} == {64}
    served.check_greedy_tokens()


@pytest.mark.parametrize(
    "name",
    [
        "glm4",  # norms around, interleaved partial rotation
        "smollm3",  # layers without rotation
        *map(full, ("llama", "gemma2", "gemma3_text", "granite", "gpt_oss", "phi3", "qwen2", "qwen3_moe", "glm4_moe")),
    ],
)
def test_usual_layers_run_in_the_native_decoder(name: str, tmp_path: Path) -> None:
    served = Served(name, tmp_path)
    served.model.record()
    served.model.decoder = served.found_decoder()
    assert served.model.decoder is not None
    served.check()
    served.check_greedy_tokens()


@pytest.mark.parametrize("name", ["qwen3_5_text", *map(full, ("lfm2", "qwen3_next", "falcon_h1"))])
def test_layers_with_a_state_run_in_the_steps_of_a_gpu(name: str, tmp_path: Path) -> None:
    served = Served(name, tmp_path, layers=4)
    served.model.record()
    served.check()
    served.check_greedy_tokens()


def test_a_layer_that_differs_stays_that_of_transformers(tmp_path: Path) -> None:
    served = Served("llama", tmp_path)
    served.model.record()
    layers = served.model.library.model.layers
    for part in (layers[1], layers[1].self_attn.k_proj, layers[0].input_layernorm, served.model.library.model.norm):
        hook = part.register_forward_hook(lambda _, given, output: output * 1.001)
        assert served.found_decoder() is None
        hook.remove()
    assert served.found_decoder() is not None


def test_layers_may_have_different_numbers_of_heads(tmp_path: Path) -> None:
    served = Served("llama", tmp_path)
    narrow = copy.deepcopy(served.model.library.config)
    narrow.num_attention_heads, narrow.num_key_value_heads = narrow.num_attention_heads // 2, 1
    narrow.head_dim = served.model.library.model.layers[1].self_attn.head_dim
    served.model.library.model.layers[1].self_attn = LlamaAttention(narrow, 1)
    served.model.record()
    assert len({layer.num_heads for layer in served.model.layers}) == 2
    served.model.decoder = served.found_decoder()
    assert served.model.decoder is not None
    served.check()


def test_a_narrow_model_in_16_bits_has_the_precision_of_a_native_one(tmp_path: Path) -> None:
    served = Served("llama", tmp_path, dtype=torch.bfloat16)
    served.model.record()
    found = served.model.decoder = served.found_decoder()
    assert found is not None
    assert found(Ops(ALONE))._weights.precision == Precision(torch.bfloat16, torch.float32, torch.float16)
    served.check()
