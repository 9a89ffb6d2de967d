"""Files that others provide: found inside a model folder, and read within a limit.

A model folder is data from somewhere else. A file that a link or a name puts outside the folder is refused, so that a model
cannot have another file of the machine read, or shown to clients. The hub's cache is an exception: its snapshots link to
the folder `blobs` of the same repository.
"""

import os
import stat
from pathlib import Path

MAX_CONFIG_BYTES = 4 << 20
"""Limit of config.json and the other small JSON files of a model. Lists of class names take up to 1 MB."""
MAX_INDEX_BYTES = 32 << 20
"""Limit of model.safetensors.index.json; that of a model with 90,000 tensors has 9 MB."""
MAX_TOKENIZER_BYTES = 128 << 20
"""Limit of tokenizer.json; those of 260,000 tokens have 35 MB."""
MAX_TOKEN_IDS = 1 << 22
"""Limit of a model's vocabulary: tables have a row for every token id."""


class ModelFileError(ValueError):
    """The file is not used; the message is one line with its path."""


def find_file(folder: Path, name: str) -> Path:
    """Return the path of the file `name` of a model folder, which need not exist.

    Raises ModelFileError if the name or a link leads out of the folder, or to something that is not a file: a library that opens a
    named pipe waits for its other end.
    """
    path = folder / name
    try:
        inside, target = folder.resolve(), path.resolve()
        is_special = target.exists() and not (target.is_file() or target.is_dir())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a null character
        raise ModelFileError(f"{path} cannot be read: {_reason(error)}") from None
    allowed = [inside]
    if inside.parent.name == "snapshots":
        allowed.append(inside.parent.parent / "blobs")
    if not any(target.is_relative_to(each) for each in allowed):
        raise ModelFileError(f"{folder}: {name!r} leads out of the model folder, to {target}: copy the file into it")
    if is_special:
        raise ModelFileError(f"{path} cannot be read: it is not a file")
    return path


def read_file(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises ModelFileError, or FileNotFoundError or NotADirectoryError if there is none.
    """
    try:
        # Opening a named pipe would wait for its other end.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelFileError(f"{path} cannot be read: it is not a file")
            data = file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path} cannot be read: {_reason(error)}") from None
    if len(data) > limit:
        raise ModelFileError(f"{path} is larger than {limit >> 20} MiB")
    return data


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
