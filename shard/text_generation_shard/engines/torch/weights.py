"""Loads the parameters of a model from a Hugging Face folder of safetensors, directly from the mapped files.

Nothing is unpickled: a folder with only *.bin is refused. A checkpoint is validated by its headers, before the first weight
is read.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_proto.model_files import MAX_INDEX_BYTES, ModelFileError, find_file, read_file
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.transfer import Transfer, copy_all

log = structlog.get_logger()

INDEX = "model.safetensors.index.json"
FP8 = torch.float8_e4m3fn
DUMMY_STD = 0.02
"""Standard deviation of random weights: transformers' default initializer_range, small enough for finite logits at any depth."""
SECONDS_BETWEEN_REPORTS = 5.0


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """This rank's part of a checkpoint tensor."""

    tensor: Tensor
    """Loaded from source[starts[0] : starts[0] + tensor.shape[0], …]."""
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint; a zero-dimensional one counts as (1,)."""
    starts: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> ParameterShard:
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    def select(self, source: Tensor) -> Tensor:
        """Return a view of this part of the checkpoint tensor."""
        for dim, start in enumerate(self.starts):
            source = source.narrow(dim, start, self.tensor.shape[dim])
        return source


NamedParameters = Mapping[str, Tensor | ParameterShard]
"""Parameters by checkpoint name; a plain tensor takes the whole checkpoint tensor."""


def load(config: ShardConfig, parameters: NamedParameters) -> None:
    """Load the parameters from the checkpoint, or fill them at random. Raises EngineError with a one-line message."""
    if config.load_format == "dummy":
        fill_dummy(parameters)
    else:
        load_weights(Path(config.model_path), parameters)


def load_weights(folder: Path, parameters: NamedParameters) -> None:
    """Load every parameter from the tensor of its name, converted to its dtype. Raises EngineError with a one-line message.

    FP8 weights loaded into a wider dtype are multiplied by the scale stored beside them (`NAME_scale`, one number or one per
    row), so that FP8 checkpoints run on devices without FP8 products.
    """
    transfers = _transfers(folder, {name: _part(parameter) for name, parameter in parameters.items()})
    progress = LoadingProgress(sum(transfer.source.nbytes for transfer in transfers))
    for copied in copy_all(transfers):
        progress.add(copied)
    progress.end()


def fill_dummy(parameters: NamedParameters) -> None:
    """Fill with random weights that are the same in every run: norms are 1, the rest is N(0, 0.02²).

    A part is sliced from its whole random tensor, generated on its own device. So all ranks agree with each other and with a
    single device of the same type; different device types generate different numbers.
    """
    for name, parameter in parameters.items():
        part = _part(parameter)
        if name.endswith("norm.weight"):
            part.tensor.fill_(1.0)
        elif name.endswith(("weight_scale", "input_scale")):
            part.tensor.fill_(DUMMY_STD)
        else:
            device = part.tensor.device
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            # FP8 weights are left to their scale: 0.02 is close to the smallest number that FP8 holds at full precision.
            std = 1.0 if part.tensor.dtype == FP8 else DUMMY_STD
            whole = torch.empty(part.shape, device=device).normal_(0.0, std, generator=generator)
            part.tensor.copy_(part.select(whole))


class LoadingProgress:
    """Logs the progress of loading every five seconds, and once at the end."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._started = self._reported = clock()
        self._done = 0

    def add(self, copied: int) -> None:
        """Count bytes of the checkpoint that are loaded."""
        self._done += copied
        now = self._clock()
        if self._done < self._total and now - self._reported >= SECONDS_BETWEEN_REPORTS:
            self._reported = now
            log.info("loading weights", gib=_gib(self._done), percent=100 * self._done // self._total)

    def end(self) -> None:
        log.info("weights loaded", gib=_gib(self._done), seconds=round(self._clock() - self._started, 1))


def _part(parameter: Tensor | ParameterShard) -> ParameterShard:
    return parameter if isinstance(parameter, ParameterShard) else ParameterShard.whole(parameter)


def _transfers(folder: Path, parts: Mapping[str, ParameterShard]) -> list[Transfer]:
    """Return the copies to make, in file order."""
    files = _files(folder)
    names_of: dict[Path, list[str]] = {}
    for name in parts:
        if name not in files:
            raise EngineError(f"{folder}: the checkpoint has no tensor {name}")
        names_of.setdefault(files[name], []).append(name)
    transfers: list[Transfer] = []
    for path, names in names_of.items():
        found = [_transfer(parts[name], tensor, name, files) for name, tensor in _mapped(path, names).items()]
        transfers += sorted(found, key=lambda transfer: transfer.source.data_ptr())
    return transfers


def _transfer(part: ParameterShard, tensor: Tensor, name: str, files: Mapping[str, Path]) -> Transfer:
    path = files[name]
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    if tuple(tensor.shape) != part.shape:
        raise EngineError(f"{path}: {name} has shape {list(tensor.shape)}, config.json says {list(part.shape)}")
    if tensor.dtype == part.tensor.dtype:
        return Transfer(part.select(tensor), part.tensor)
    if part.tensor.dtype == FP8:
        raise EngineError(f"{path}: {name} is {_type_name(tensor)}, config.json says {_type_name(part.tensor)}")
    if tensor.dtype == FP8 and (scale_file := files.get(f"{name}_scale")) is not None:
        return Transfer(part.select(tensor), part.tensor, _row_scales(part, f"{name}_scale", scale_file))
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise EngineError(f"{path}: {name} is {_type_name(tensor)}, a quantized checkpoint")
    return Transfer(part.select(tensor), part.tensor)


def _row_scales(part: ParameterShard, name: str, path: Path) -> Tensor:
    """Return the factors of the rows of a part: [rows, 1], float32."""
    scale = _mapped(path, [name])[name]
    if scale.numel() not in (1, part.shape[0]):
        raise EngineError(f"{path}: {name} has shape {list(scale.shape)}, only one scale, or one a row, is supported")
    rows = scale.float().reshape(-1, 1).expand(part.shape[0], 1)
    return rows.narrow(0, part.starts[0], part.tensor.shape[0])


def _mapped(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Return views of a mapped file: nothing is read before it is copied, and the views keep the mapping alive."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, from the index if there is one, else from the headers of all *.safetensors."""
    if (folder / INDEX).exists():
        return _indexed_files(folder)
    try:
        paths = [find_file(folder, path.name) for path in sorted(folder.glob("*.safetensors"))]
    except ModelFileError as error:
        raise EngineError(str(error)) from None
    if not paths:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        hint = ", only pickled weights, which are never loaded: convert them first" if pickled else ""
        raise EngineError(f"{folder} has no *.safetensors{hint}")
    files: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from None
    return files


def _indexed_files(folder: Path) -> dict[str, Path]:
    try:
        index = find_file(folder, INDEX)
        weight_map = json.loads(read_file(index, MAX_INDEX_BYTES))["weight_map"]
        found = {str(file): find_file(folder, str(file)) for file in set(weight_map.values())}
        files = {str(name): found[str(file)] for name, file in weight_map.items()}
    except ModelFileError as error:
        raise EngineError(str(error)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineError(f"{folder / INDEX} is not a safetensors index: {_one_line(error)}") from None
    for path in sorted(found.values()):
        if not path.is_file():
            raise EngineError(f"{index} names {path.name}, which does not exist")
    return files


def _unreadable(path: Path, error: Exception) -> EngineError:
    return EngineError(f"{path} cannot be read, is it complete? {_one_line(error)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _gib(size: int) -> float:
    return round(size / 2**30, 2)
