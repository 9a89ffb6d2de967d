"""Download a model from the Hugging Face hub, in a separate process so that the launcher can handle signals.

A download that was killed is continued by the next one.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub import errors as hub
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.utils.tqdm import tqdm

from text_generation_common.command_line import parse_config
from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_common.lifeline import follow_parent
from text_generation_common.log import log
from text_generation_common.logs import configure_logging
from text_generation_common.one_line import one_line
from text_generation_common.progress import WorkProgress
from text_generation_launcher.config import DownloadConfig

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Configuration, tokenizer, templates."""
WEIGHTS = ("*.safetensors",)
"""Never pickle files: loading them runs code."""
ENGINES = ("*.engine",)
"""Engines compiled from weights, which TensorRT-LLM ≤ 1.2 loads too."""

HUB_ERRORS = (hub.HfHubHTTPError, hub.OfflineModeIsEnabled, hub.EntryNotFoundError, hub.HFValidationError, OSError)
"""Errors of a call of the hub."""


class _Progress(tqdm):
    """The hub's progress bars as log records: one per finished file, and the bytes while they are downloaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (the signature of tqdm)
        silent = open(os.devnull, "w")  # noqa: SIM115  (lives as long as the bar)
        super().__init__(*args, **(kwargs | {"disable": False, "file": silent}))  # type: ignore[no-untyped-call]
        self._progress = WorkProgress("downloading", 0, in_bytes=True)

    def update(self, n: float | None = 1) -> None:
        super().update(n)
        if self.unit == "B":
            self._progress.total = int(self.total or 0)  # it grows while files are found
            self._progress.add(int(n or 0))
        else:
            log.info("downloading", files=int(self.n), of=self.total)


def fetch(config: DownloadConfig) -> Path:
    """Download the model and return its folder. Raises CannotServe."""
    if config.headers_folder:
        return fetch_headers(config, Path(config.headers_folder))
    weight_patterns = (*WEIGHTS, *(ENGINES if config.engines else ())) if config.weights else ()
    try:
        folder = Path(
            snapshot_download(
                config.model_id,
                revision=config.revision,
                cache_dir=config.cache_dir,
                allow_patterns=[*SMALL_FILES, *weight_patterns],
                ignore_patterns=["*/*"],
                local_files_only=HF_HUB_OFFLINE,  # some versions ask the hub all the same, for a commit
                tqdm_class=_Progress,
            )
        )
    except HUB_ERRORS as error:
        raise CannotServe(_reason(error, config)) from error
    if weight_patterns and not any(path for pattern in weight_patterns for path in folder.glob(pattern)):
        raise CannotServe(
            f"{config.model_id} has no {' or '.join(weight_patterns)} weights; no other format is supported"
        )
    return folder


def fetch_headers(config: DownloadConfig, folder: Path) -> Path:
    """Fill `folder` with copies of the small files and, for the weights, with files that have only headers."""
    small = fetch(config.model_copy(update={"headers_folder": "", "weights": False}))
    for path in small.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    if config.weights:
        try:
            metadata = HfApi().get_safetensors_metadata(config.model_id, revision=config.revision)
        except (*HUB_ERRORS, hub.NotASafetensorsRepoError, hub.SafetensorsParsingError) as error:
            raise CannotServe(_reason(error, config)) from error
        for name, file in metadata.files_metadata.items():
            write_header(folder / Path(name).name, file.tensors)
    return folder


def write_header(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write a safetensors file of the right size with its header. The rest is a hole, which takes no space."""
    header = json.dumps(
        {
            name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": list(tensor.data_offsets)}
            for name, tensor in tensors.items()
        }
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0))


def _reason(error: Exception, config: DownloadConfig) -> str:
    at = f" at revision {config.revision}" if config.revision else ""
    match error:
        case hub.HFValidationError():
            return f"{config.model_id} is neither a local folder nor an id on the hub"
        case hub.GatedRepoError():
            return f"{config.model_id} is gated: accept its terms on the hub and set HF_TOKEN"
        case hub.RevisionNotFoundError():
            return f"{config.model_id} has no revision {config.revision}"
        case hub.RepositoryNotFoundError():
            return f"the hub has no model {config.model_id}, or it is private and needs HF_TOKEN"
        case hub.OfflineModeIsEnabled() | hub.LocalEntryNotFoundError():
            return f"{config.model_id}{at} is not in the cache, and the hub cannot be reached"
        case _:
            return one_line(error)


def main() -> None:
    config = parse_config(DownloadConfig)
    configure_logging(config, "download")
    follow_parent(config.lifeline_fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # exit at once: Python would wait for the download threads
    try:
        folder = fetch(config)
    except CannotServe as error:
        log.error("download failed", reason=str(error))
        sys.exit(ExitCode.FAILED)
    os.write(config.result_fd, os.fsencode(folder))


if __name__ == "__main__":
    main()
