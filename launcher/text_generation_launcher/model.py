"""Find the folders of the model and of its adapters; download those that are named by an id on the hub."""

import os
from collections.abc import Mapping
from pathlib import Path

from text_generation_common.exit_codes import CannotServe
from text_generation_common.lora import AdapterSource, adapters_to_text, parse_adapters
from text_generation_common.settings import ChildConfig
from text_generation_launcher.child import run_to_end
from text_generation_launcher.config import DownloadConfig, LauncherConfig, child_settings
from text_generation_launcher.plan import ChildSpec, child_argv, child_env
from text_generation_launcher.shutdown import GracefulShutdown

DOWNLOAD_STOP_TIMEOUT = 5.0

HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")


async def resolve_model(
    config: LauncherConfig,
    environ: Mapping[str, str],
    stop: GracefulShutdown,
    lifeline_fd: int,
    headers_folder: Path | None = None,
) -> Path:
    """Return the model's folder: --model-id itself, or the folder of the download. Raises CannotServe.

    With `headers_folder` a download fills that: with the small files, and of the weights only the headers.
    """
    download = DownloadConfig.of(
        model_id=config.model_id,
        revision=config.revision,
        weights=config.needs_weights,
        engines=config.engine == "tensorrt-llm" and headers_folder is None,
        headers_folder="" if headers_folder is None else str(headers_folder),
    )
    return await _resolve(download, config, environ, stop, lifeline_fd)


async def resolve_adapters(
    config: LauncherConfig, environ: Mapping[str, str], stop: GracefulShutdown, lifeline_fd: int
) -> str:
    """Return --lora-adapters with the folders of the adapters. Raises CannotServe."""
    folders: list[AdapterSource] = []
    for adapter in parse_adapters(config.lora_adapters):
        download = DownloadConfig.of(model_id=adapter.source, revision=adapter.revision or None)
        folder = str(await _resolve(download, config, environ, stop, lifeline_fd))
        if any(character in folder for character in ",=@"):
            raise CannotServe(
                f"the folder of the LoRA adapter {adapter.name} has a comma, = or @ in its path: {folder}"
            )
        folders.append(AdapterSource(adapter.name, folder))
    return adapters_to_text(folders)


async def _resolve(
    download: DownloadConfig,
    config: LauncherConfig,
    environ: Mapping[str, str],
    stop: GracefulShutdown,
    lifeline_fd: int,
) -> Path:
    """Return the folder of a model or an adapter; `download` is how it is downloaded if it is not a folder."""
    if (folder := local_folder(download.model_id)) is not None:
        return folder
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb") as path:
        with os.fdopen(write_fd, "wb"):
            own = {"lifeline_fd": lifeline_fd, "result_fd": write_fd, "cache_dir": config.huggingface_hub_cache}
            download = download.model_copy(update=child_settings(config, ChildConfig) | own)
            spec = ChildSpec(
                "download",
                child_argv("text_generation_launcher.download", download),
                child_env(environ, DownloadConfig) | hub_tokens(environ),
                (lifeline_fd, write_fd),
                DOWNLOAD_STOP_TIMEOUT,
                config=download,
            )
            code = await run_to_end(spec, stop.grace_period)
        if code != 0:
            raise CannotServe(f"downloading {download.model_id} failed with exit code {code}")
        return Path(os.fsdecode(path.read1(1 << 16)))


def local_folder(model_id: str) -> Path | None:
    """Return the folder with this path; None for an id on the hub. Raises CannotServe."""
    try:
        folder = Path(model_id).expanduser()
        if folder.is_dir():
            return folder.absolute()
        if model_id.startswith(("/", "./", "../", "~")) or folder.exists():
            command = f"text-generation-launcher convert {model_id} FOLDER"
            hint = f": GGUF is not read, convert it: {command}" if model_id.endswith(".gguf") else ""
            raise CannotServe(f"{model_id} is not a folder{hint}")
    except (OSError, RuntimeError) as error:  # no permission, too long a name; no such user after ~
        raise CannotServe(f"the model folder cannot be found: {getattr(error, 'strerror', None) or error}") from error
    return None


def hub_tokens(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with tokens for the hub, which only the download needs."""
    tokens = {name: environ[name] for name in HUB_TOKENS if name in environ}
    if "HF_API_TOKEN" in tokens:  # TGI's deprecated name
        tokens.setdefault("HF_TOKEN", tokens["HF_API_TOKEN"])
    return tokens
