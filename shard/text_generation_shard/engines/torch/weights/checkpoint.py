"""The tensors of a checkpoint: a Hugging Face folder of safetensors, directly from the mapped files.

Nothing is unpickled: a folder with only *.bin is refused.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_common.model_files import MAX_INDEX_BYTES, ModelFileError, find_file, read_file
from text_generation_common.one_line import one_line
from text_generation_shard.engine import EngineError

INDEX = "model.safetensors.index.json"


TEXT_PREFIXES = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "backbone.": "model.",
}
"""Prefixes of the text part of a model of text and images, as transformers 4 and 5 write it, and of a Nemotron-H; and those of
other models of text."""


class Checkpoint:
    """The tensors of a folder and their files; with `text_only`, a text part has the names of a model of text. Raises EngineError."""

    def __init__(self, folder: Path, *, text_only: bool = False) -> None:
        self.folder = folder
        self._files = _files(folder)
        self._stored: dict[str, str] = {}
        """Names in the files, where they differ."""
        for name in list(self._files) if text_only else ():
            if (renamed := text_name(name)) != name:
                self._stored[renamed] = name
                self._files[renamed] = self._files.pop(name)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        return list(self._files)

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in set(self._files.values()))

    def path(self, name: str) -> Path:
        return self._files[name]

    def map(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return views of mapped files, which keep the mapping alive, in the order of the files' data. Nothing is read before it is copied."""
        names_of: dict[Path, list[str]] = {}
        for name in names:
            names_of.setdefault(self._files[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for path, some in names_of.items():
            with _opened(path) as file:
                found = {name: file.get_tensor(self._stored.get(name, name)) for name in some}
            tensors |= sorted(found.items(), key=lambda item: item[1].data_ptr())
        return tensors


def text_name(name: str) -> str:
    """Return the name, in a model of text, of a tensor or module of the text part of a model of text and images."""
    for prefix, ours in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def names_of_text_part(name: str) -> list[str]:
    """Return the names that a tensor or module of a model of text may have: its own, and those of `text_name`."""
    prefixes = ((prefix, ours) for prefix, ours in TEXT_PREFIXES.items() if name.startswith(ours))
    return [name, *(prefix + name.removeprefix(ours) for prefix, ours in prefixes)]


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, from the index if there is one, else from the headers of all *.safetensors."""
    if (folder / INDEX).exists():
        return _indexed_files(folder)
    try:
        # Not by glob, to which a folder that cannot be read is empty.
        paths = [find_file(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".safetensors")]
    except ModelFileError as error:
        raise EngineError(str(error)) from None
    except OSError as error:
        raise EngineError(f"{folder} cannot be read: {error.strerror}") from None
    if not paths:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        hint = ", only pickled weights, which are never loaded: convert them first" if pickled else ""
        if gguf := next(folder.glob("*.gguf"), None):
            hint = f", only GGUF, which is not read: text-generation-launcher convert {gguf} FOLDER"
        raise EngineError(f"{folder} has no *.safetensors{hint}")
    files: dict[str, Path] = {}
    for path in paths:
        with _opened(path) as file:
            files |= dict.fromkeys(file.keys(), path)
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
        raise EngineError(f"{folder / INDEX} is not a safetensors index: {one_line(error)}") from None
    for path in sorted(found.values()):
        if not path.is_file():
            raise EngineError(f"{index} names {path.name}, which does not exist")
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it cannot be mapped
        if path.exists() and not os.access(path, os.R_OK):
            # The library calls such a file missing.
            raise EngineError(f"{path} cannot be read: {os.strerror(errno.EACCES)}") from None
        raise EngineError(f"{path} cannot be read, is it complete? {one_line(error)}") from None
