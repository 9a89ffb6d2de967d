"""Fetch a model from the Hugging Face hub: a process of its own, so that the launcher goes on hearing signals.

What is left behind when it is killed half-way is taken up by the next try.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import structlog
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from text_generation_proto.logs import configure_logging
from text_generation_proto.process import ExitCode, ProcessConfig, follow_parent, parse_config

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Configuration, tokenizer, templates."""
WEIGHTS = ("*.safetensors",)
"""Never pickle: loading it runs code."""
ENGINES = ("*.engine",)
"""What TensorRT-LLM ≤ 1.2 loads as well: engines compiled from weights."""

PROGRESS_INTERVAL = 10.0
"""Seconds between two words on the bytes fetched."""

log = structlog.get_logger()


class DownloadConfig(ProcessConfig, cli_prog_name="text_generation_launcher.download"):
    """Fetch a model and write the path of its folder to a pipe."""

    model_id: str
    """Id on the hub."""
    revision: str | None = None
    """Branch, tag or commit."""
    cache_dir: str | None = None
    """Folder of the hub's cache."""
    weights: bool = True
    """Whether to fetch the weights, too."""
    engines: bool = False
    """Whether compiled engines are as good as weights."""
    result_fd: int
    """Where to write the path."""


class DownloadError(Exception):
    """Why the model is not to be had."""


class _Progress(tqdm):
    """The hub's progress bars as log records: one for each file that is there, and the bytes now and then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (as the hub calls it)
        silent = open(os.devnull, "w")  # noqa: SIM115  (lives as long as the bar)
        super().__init__(*args, **(kwargs | {"disable": False, "file": silent}))  # type: ignore[no-untyped-call]
        self._said = time.monotonic()

    def update(self, n: float | None = 1) -> None:
        super().update(n)
        now = time.monotonic()
        if self.unit == "B" and now - self._said >= PROGRESS_INTERVAL:
            self._said = now
            log.info("downloading", megabytes=int(self.n) >> 20, of=int(self.total or 0) >> 20)
        elif self.unit != "B":
            log.info("downloading", files=int(self.n), of=self.total)


def fetch(config: DownloadConfig) -> Path:
    """The folder with the model's files. Raises DownloadError."""
    heavy = (*WEIGHTS, *(ENGINES if config.engines else ())) if config.weights else ()
    try:
        folder = Path(
            snapshot_download(
                config.model_id,
                revision=config.revision,
                cache_dir=config.cache_dir,
                allow_patterns=[*SMALL_FILES, *heavy],
                ignore_patterns=["*/*"],
                tqdm_class=_Progress,
            )
        )
    except (HfHubHTTPError, OfflineModeIsEnabled, EntryNotFoundError, HFValidationError, OSError) as error:
        raise DownloadError(_reason(error, config)) from error
    if heavy and not any(path for pattern in heavy for path in folder.glob(pattern)):
        raise DownloadError(f"{config.model_id} has no {' or '.join(heavy)} weights; no other kind is read")
    return folder


def _reason(error: Exception, config: DownloadConfig) -> str:
    at = f" at revision {config.revision}" if config.revision else ""
    match error:
        case HFValidationError():
            return f"{config.model_id} is neither a folder here nor an id on the hub"
        case GatedRepoError():
            return f"{config.model_id} is gated: accept its terms on the hub and set HF_TOKEN"
        case RevisionNotFoundError():
            return f"{config.model_id} has no revision {config.revision}"
        case RepositoryNotFoundError():
            return f"the hub has no model {config.model_id}, or not for you: a private one needs HF_TOKEN"
        case OfflineModeIsEnabled() | LocalEntryNotFoundError():
            return f"{config.model_id}{at} is not in the cache, and the hub is not to be reached"
        case _:
            return " ".join(str(error).split()) or type(error).__name__


def main() -> None:
    """Entry point."""
    config = parse_config(DownloadConfig)
    configure_logging(config, "download")
    follow_parent(config.lifeline_fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once: the fetching threads would have to be waited for
    try:
        folder = fetch(config)
    except DownloadError as error:
        log.error("download failed", reason=str(error))
        sys.exit(ExitCode.FAILED)
    os.write(config.result_fd, os.fsencode(folder))


if __name__ == "__main__":
    main()
