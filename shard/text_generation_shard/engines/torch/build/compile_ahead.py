"""Compiles the kernels of a model in other processes, compile_part.py, while its weights are loaded.

They run the model with one layer of each kind and random weights, and end with this process. Their kernels are those of the model,
because no kernel depends on the number of layers, and stay in the caches on disk, of Triton and humming. A file beside Triton's
cache remembers a model for which this was done.
"""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import torch

from text_generation_common.log import log
from text_generation_common.one_line import one_line
from text_generation_common.progress import finished_work, show
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.build.footprint import native_footprint
from text_generation_shard.engines.torch.build.prepare import Prepared
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.kernels.compiled import CompiledMarker

PROGRAM = "text_generation_shard.engines.torch.build.compile_part"
HELPERS = 4
SETTINGS = frozenset(
    (
        "model_path",
        "load_format",
        "dtype",
        "quantize",
        "kv_cache_dtype",
        "mamba_ssm_cache_dtype",
        "speculate",
        "speculator",
        "device",
        "max_batch_size",
        "cuda_memory_fraction",
        "max_batch_image_tokens",
    )
)
"""The settings on which the kernels of a model without LoRA adapters depend."""
KERNEL = "kernel "
"""Start of a line with the name of a kernel that a helper has compiled."""


class CompileAhead:
    """The helpers of a start. None run on a CPU, in a group, without room for them, or if all has been compiled before."""

    def __init__(self, config: ShardConfig, prepared: Prepared[ModelConfig]) -> None:
        self._helpers: list[subprocess.Popen[str]] = []
        self._followers: list[Thread] = []
        self._started = time.monotonic()
        self._kernels = 0
        self._others: dict[int, str] = {}
        """The last other line of each helper, by process id: the error of one that fails."""
        if prepared.target.device.type == "cpu" or config.world_size > 1:
            return
        settings = settings_of(config)
        self._done = _marker(config, settings, prepared.target.device)
        if self._done.exists() or not have_room(config, prepared):
            return
        for part in range(HELPERS):
            command = [sys.executable, "-m", PROGRAM, str(part), str(HELPERS)]
            helper = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
            )
            assert helper.stdin is not None
            helper.stdin.write(f"{settings}\n")
            helper.stdin.flush()
            self._helpers.append(helper)
            self._followers.append(Thread(target=self._follow, args=(helper,), name="compiling", daemon=True))
            self._followers[-1].start()

    def _follow(self, helper: subprocess.Popen[str]) -> None:
        """Show the names of the kernels that a helper compiles."""
        assert helper.stdout is not None
        for line in helper.stdout:
            if line.startswith(KERNEL):
                self._kernels += 1
                show(f"compiling kernels: {line.removeprefix(KERNEL).strip()}")
            elif line.strip():
                self._others[helper.pid] = line.strip()

    def wait(self) -> None:
        """Wait for the helpers. What they failed to compile is compiled when it is used."""
        helpers, self._helpers = self._helpers, []
        if not helpers:
            return
        codes = {}
        for helper, follower in zip(helpers, self._followers, strict=True):
            with helper:
                codes[helper.pid] = helper.wait()
                follower.join()
        show("")
        finished_work["compiling kernels ahead"] = seconds = time.monotonic() - self._started
        errors = sorted({one_line(self._others.get(pid, "")) for pid, code in codes.items() if code})
        log.info("kernels compiled", processes=HELPERS, kernels=self._kernels, seconds=round(seconds, 1), errors=errors)
        if not errors:
            self._done.create()


def settings_of(config: ShardConfig) -> str:
    """Return the settings of a helper as JSON: of random weights, without LoRA adapters."""
    return config.model_copy(update={"load_format": "dummy"}).model_dump_json(include={*SETTINGS})


def one_of_each_kind(model: ModelConfig) -> ModelConfig:
    """Return a model with the first of the layers that have the same attention, rotation, kind of MLP and states.

    A draft model reads the hidden states after the last one, as often as of the whole model.
    """
    experts, states = model.experts, model.states
    no = (False,) * model.num_layers
    has_experts = no if experts is None else experts.layers
    has_states, has_attention = (no, no) if states is None else (states.layers, states.attention)
    kinds = list(zip(model.layers, model.ropes, has_experts, has_states, has_attention, strict=True))
    layers, ropes, has_experts, has_states, has_attention = zip(*sorted(set(kinds), key=kinds.index), strict=True)
    own = model.prediction
    return replace(
        model,
        prediction=own and replace(own, taken_before=(len(layers),) * len(own.taken_before)),
        layers=layers,
        ropes=ropes,
        experts=experts and replace(experts, layers=has_experts),
        states=states and replace(states, layers=has_states, attention=has_attention),
    )


def _marker(config: ShardConfig, settings: str, device: torch.device) -> "CompiledMarker":
    # Imports Triton, which torch for CPUs comes without.
    from text_generation_shard.engines.torch.kernels.compiled import CompiledMarker

    files = [Path(config.model_path) / name for name in ("config.json", "hf_quant_config.json")]
    return CompiledMarker(device, settings, *(file.read_text() for file in files if file.exists()))


def have_room(config: ShardConfig, prepared: Prepared[ModelConfig]) -> bool:
    """Return True if the model and the helpers fit in the device's memory together."""
    whole = native_footprint(config, prepared, WarmUpLimits())
    small = replace(prepared, model=one_of_each_kind(prepared.model))
    own = native_footprint(ShardConfig.model_validate_json(settings_of(config)), small, WarmUpLimits())
    helper = own.weights + whole.largest_step
    return whole.weights + HELPERS * helper <= whole.memory
