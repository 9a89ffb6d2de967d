"""Find the folders of the model and of its adapters; download those that are named by an id on the hub."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from text_generation_common.lora import AdapterSource, adapters_to_text, parse_adapters
from text_generation_common.settings import ChildConfig
from text_generation_launcher.child import run_to_end
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.plan import ChildSpec, child_argv, child_env
from text_generation_launcher.shutdown import GracefulShutdown

DOWNLOAD_STOP_TIMEOUT = 5.0

HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")

log = structlog.get_logger()


class ModelError(Exception):
    """The model cannot be found or downloaded; the log has the reason."""


async def resolve_model(
    config: LauncherConfig,
    environ: Mapping[str, str],
    stop: GracefulShutdown,
    lifeline_fd: int,
    headers_folder: Path | None = None,
) -> Path:
    """Return the model's folder: --model-id itself, or the folder of the download. Raises ModelError.

    With `headers_folder` a download fills that: with the small files, and of the weights only the headers.
    """
    flags = (
        "--weights" if config.needs_weights else "--no-weights",
        *(("--engines",) if config.engine == "tensorrt-llm" and headers_folder is None else ()),
        *((f"--headers-folder={headers_folder}",) if headers_folder is not None else ()),
        *((f"--revision={config.revision}",) if config.revision else ()),
    )
    return await _resolve(config.model_id, flags, config, environ, stop, lifeline_fd)


async def resolve_adapters(
    config: LauncherConfig, environ: Mapping[str, str], stop: GracefulShutdown, lifeline_fd: int
) -> str:
    """Return --lora-adapters with the folders of the adapters. Raises ModelError."""
    folders: list[AdapterSource] = []
    for adapter in parse_adapters(config.lora_adapters):
        flags = (f"--revision={adapter.revision}",) if adapter.revision else ()
        folder = str(await _resolve(adapter.source, flags, config, environ, stop, lifeline_fd))
        if any(character in folder for character in ",=@"):
            raise ModelError(f"the folder of the LoRA adapter {adapter.name} has a comma, = or @ in its path: {folder}")
        folders.append(AdapterSource(adapter.name, folder))
    return adapters_to_text(folders)


async def _resolve(
    model_id: str,
    flags: Sequence[str],
    config: LauncherConfig,
    environ: Mapping[str, str],
    stop: GracefulShutdown,
    lifeline_fd: int,
) -> Path:
    if (folder := local_folder(model_id)) is not None:
        return folder
    read_fd, write_fd = os.pipe()
    try:
        try:
            code = await run_to_end(
                _download(model_id, flags, config, environ, lifeline_fd, write_fd),
                stop.grace_period,
            )
        finally:
            os.close(write_fd)
        if code != 0:
            raise ModelError(f"downloading {model_id} failed with exit code {code}")
        return Path(os.fsdecode(os.read(read_fd, 1 << 16)))  # a path is far smaller than a pipe's buffer
    finally:
        os.close(read_fd)


def local_folder(model_id: str) -> Path | None:
    """Return the folder with this path; None for an id on the hub. Raises ModelError."""
    try:
        folder = Path(model_id).expanduser()
        if folder.is_dir():
            return folder.absolute()
        if model_id.startswith(("/", "./", "../", "~")) or folder.exists():
            command = f"text-generation-launcher convert {model_id} FOLDER"
            hint = f": GGUF is not read, convert it: {command}" if model_id.endswith(".gguf") else ""
            raise ModelError(f"{model_id} is not a folder{hint}")
    except (OSError, RuntimeError) as error:  # no permission, too long a name; no such user after ~
        raise ModelError(f"the model folder cannot be found: {getattr(error, 'strerror', None) or error}") from error
    return None


def hub_tokens(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with tokens for the hub, which only the download needs."""
    tokens = {name: environ[name] for name in HUB_TOKENS if name in environ}
    if "HF_API_TOKEN" in tokens:  # TGI's deprecated name
        tokens.setdefault("HF_TOKEN", tokens["HF_API_TOKEN"])
    return tokens


def _download(
    model_id: str,
    flags: Sequence[str],
    config: LauncherConfig,
    environ: Mapping[str, str],
    lifeline_fd: int,
    result_fd: int,
) -> ChildSpec:
    settings = ChildConfig.of(json_output=config.json_output, log_level=config.log_level, lifeline_fd=lifeline_fd)
    argv = (
        *child_argv("text_generation_launcher.download", settings),
        f"--model-id={model_id}",
        f"--result-fd={result_fd}",
        *flags,
        *((f"--cache-dir={config.huggingface_hub_cache}",) if config.huggingface_hub_cache else ()),
    )
    env = child_env(environ, ChildConfig) | hub_tokens(environ)
    return ChildSpec("download", argv, env, (lifeline_fd, result_fd), DOWNLOAD_STOP_TIMEOUT, config=settings)
