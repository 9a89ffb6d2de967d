"""Download a model from the Hugging Face hub, in a separate process so that the launcher can handle signals.

A download that was killed is continued by the next one.
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

from text_generation_proto.exit_codes import ExitCode
from text_generation_proto.lifeline import follow_parent
from text_generation_proto.logs import configure_logging
from text_generation_proto.one_line import one_line
from text_generation_proto.settings import ChildConfig, parse_config

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Configuration, tokenizer, templates."""
WEIGHTS = ("*.safetensors",)
"""Never pickle files: loading them runs code."""
ENGINES = ("*.engine",)
"""Engines compiled from weights, which TensorRT-LLM ≤ 1.2 loads too."""

PROGRESS_INTERVAL = 10.0
"""Seconds between two log records of the bytes downloaded."""

log = structlog.get_logger()


class DownloadConfig(ChildConfig, cli_prog_name="text_generation_launcher.download"):
    """Download a model and write the path of its folder to a pipe."""

    model_id: str
    """Id on the hub."""
    revision: str | None = None
    """Branch, tag or commit."""
    cache_dir: str | None = None
    """Folder of the hub's cache."""
    weights: bool = True
    """Download the weights too."""
    engines: bool = False
    """Accept compiled engines instead of weights."""
    result_fd: int
    """File descriptor that the path is written to."""


class DownloadError(Exception):
    """The model cannot be downloaded; the message gives the reason."""


class _Progress(tqdm):
    """The hub's progress bars as log records: one per finished file, and the bytes every PROGRESS_INTERVAL."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (the signature of tqdm)
        silent = open(os.devnull, "w")  # noqa: SIM115  (lives as long as the bar)
        super().__init__(*args, **(kwargs | {"disable": False, "file": silent}))  # type: ignore[no-untyped-call]
        self._logged_at = time.monotonic()

    def update(self, n: float | None = 1) -> None:
        super().update(n)
        now = time.monotonic()
        if self.unit == "B" and now - self._logged_at >= PROGRESS_INTERVAL:
            self._logged_at = now
            log.info("downloading", megabytes=int(self.n) >> 20, of=int(self.total or 0) >> 20)
        elif self.unit != "B":
            log.info("downloading", files=int(self.n), of=self.total)


def fetch(config: DownloadConfig) -> Path:
    """Download the model and return its folder. Raises DownloadError."""
    weight_patterns = (*WEIGHTS, *(ENGINES if config.engines else ())) if config.weights else ()
    try:
        folder = Path(
            snapshot_download(
                config.model_id,
                revision=config.revision,
                cache_dir=config.cache_dir,
                allow_patterns=[*SMALL_FILES, *weight_patterns],
                ignore_patterns=["*/*"],
                tqdm_class=_Progress,
            )
        )
    except (HfHubHTTPError, OfflineModeIsEnabled, EntryNotFoundError, HFValidationError, OSError) as error:
        raise DownloadError(_reason(error, config)) from error
    if weight_patterns and not any(path for pattern in weight_patterns for path in folder.glob(pattern)):
        raise DownloadError(
            f"{config.model_id} has no {' or '.join(weight_patterns)} weights; no other format is supported"
        )
    return folder


def _reason(error: Exception, config: DownloadConfig) -> str:
    at = f" at revision {config.revision}" if config.revision else ""
    match error:
        case HFValidationError():
            return f"{config.model_id} is neither a local folder nor an id on the hub"
        case GatedRepoError():
            return f"{config.model_id} is gated: accept its terms on the hub and set HF_TOKEN"
        case RevisionNotFoundError():
            return f"{config.model_id} has no revision {config.revision}"
        case RepositoryNotFoundError():
            return f"the hub has no model {config.model_id}, or it is private and needs HF_TOKEN"
        case OfflineModeIsEnabled() | LocalEntryNotFoundError():
            return f"{config.model_id}{at} is not in the cache, and the hub cannot be reached"
        case _:
            return one_line(error)


def main() -> None:
    """Download the model of the command line."""
    config = parse_config(DownloadConfig)
    configure_logging(config, "download")
    follow_parent(config.lifeline_fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # exit at once: Python would wait for the download threads
    try:
        folder = fetch(config)
    except DownloadError as error:
        log.error("download failed", reason=str(error))
        sys.exit(ExitCode.FAILED)
    os.write(config.result_fd, os.fsencode(folder))


if __name__ == "__main__":
    main()
