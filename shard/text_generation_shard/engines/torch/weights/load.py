"""Loads the parameters of a model from a checkpoint, or fills them at random.

A checkpoint is validated by its headers, before the first weight is read.
"""

import zlib
from pathlib import Path

import torch
from torch import Tensor

from text_generation_common.log import log
from text_generation_common.progress import WorkProgress, gib
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint
from text_generation_shard.engines.torch.weights.parameter import NamedParameters, ParameterShard
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import FP8
from text_generation_shard.engines.torch.weights.quantization.loading import LoadingPlan
from text_generation_shard.engines.torch.weights.quantization.schemes import Scheme
from text_generation_shard.engines.torch.weights.transfer import Transfer, copy_all

DUMMY_STD = 0.02
"""Standard deviation of random weights: transformers' default initializer_range, small enough for finite logits at any depth."""
ONES = (
    "norm.weight",
    "norm_f.weight",
    "layernorm_1.weight",
    "layernorm_2.weight",
    "layer_scalar",
    "router.scale",
    "per_expert_scale",
)
"""Ends of the names of parameters that are 1 in a model without training."""


def load(config: ShardConfig, parameters: NamedParameters, scheme: Scheme | None, folder: str | Path = "") -> None:
    """Load the parameters from the checkpoint, or that in `folder`, or fill them at random. Raises EngineError in one line."""
    if config.load_format == "dummy":
        fill_dummy(parameters)
    else:
        load_weights(Path(folder or config.model_path), parameters, scheme)


def load_weights(folder: Path, parameters: NamedParameters, scheme: Scheme | None = None) -> None:
    """Load every parameter from the tensor of its name, dequantized and converted to its dtype. Raises EngineError."""
    transfers = plan_loading(folder, parameters, scheme)
    progress = WorkProgress("loading weights", sum(transfer.nbytes for transfer in transfers), in_bytes=True)
    for copied in copy_all(transfers):
        progress.add(copied)
    progress.end()
    log.info("weights loaded", gib=gib(progress.done), seconds=round(progress.seconds, 1))


def plan_loading(folder: Path, parameters: NamedParameters, scheme: Scheme | None) -> list[Transfer]:
    """Return the copies that fill the parameters; only headers are read. Raises EngineError for tensors that do not fit."""
    parts = {name: part_of(parameter) for name, parameter in parameters.items()}
    return LoadingPlan(Checkpoint(folder, text_only=True), parts, scheme).transfers()


def fill_dummy(parameters: NamedParameters) -> None:
    """Fill with random weights that are the same in every run: norms and factors are 1, the rest is N(0, 0.02²).

    A part is sliced from its whole random tensor, generated on its own device. So all ranks agree with each other and with a
    single device of the same type; different device types generate different numbers.
    """
    for key, parameter in parameters.items():
        part = part_of(parameter)
        name = part.name or key
        device, spread = part.tensor.device, part.packed and part.packed.spread
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        if name.endswith(ONES):
            part.tensor.fill_(1.0)
        elif name.endswith(("weight_scale", "input_scale")):
            part.tensor.fill_(DUMMY_STD / (spread or 1.0))
        elif part.tensor.dtype == torch.int32:
            codes = torch.randint(-(1 << 31), 1 << 31, part.shape, generator=generator, device=device)
            # Without this bit no byte is NaN in float8_e4m3fn.
            part.tensor.copy_(part.select(codes if spread else codes & ~0x40404040))
        else:
            # FP8 weights are left to their scale: 0.02 is close to the smallest number that FP8 holds at full precision.
            std = 1.0 if part.tensor.dtype == FP8 else DUMMY_STD
            whole = torch.empty(part.shape, device=device).normal_(0.0, std, generator=generator)
            part.tensor.copy_(part.select(whole))


def part_of(parameter: Tensor | ParameterShard) -> ParameterShard:
    """Return the part of the checkpoint that a parameter takes."""
    return parameter if isinstance(parameter, ParameterShard) else ParameterShard.whole(parameter)
