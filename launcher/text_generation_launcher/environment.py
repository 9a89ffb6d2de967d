"""The report of `text-generation-launcher env`: versions, devices, packages and settings."""

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution, version

import yaml

from text_generation_common.effective import masked
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.devices import Devices, find_devices
from text_generation_shard.gpus import Gpu, core_list

_PACKAGES = (
    *("text-generation-trtllm", "safetensors", "accelerate", "humming-kernels", "ray", "huggingface-hub", "pydantic"),
    *("uvloop", "numpy", "torch", "triton", "flashinfer-python", "tensorrt-llm", "tensorrt", "cuda-python"),
    *("cuda-core", "cuda-bindings", "transformers", "tokenizers", "llguidance", "grpcio", "aiohttp"),
)


def describe_environment(devices: Devices) -> dict[str, object]:
    """Return platform, devices and package versions as fields of a log record (--env)."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": _commit(),
        "cpus": os.cpu_count(),
        "driver": devices.driver,
        "devices": devices.count,
        "device": devices.name,
        "gpus": [_describe(gpu, devices) for gpu in devices.gpus],
        **{package: found for package in _PACKAGES if (found := _version(package)) is not None},
    }


def _describe(gpu: Gpu, devices: Devices) -> dict[str, object]:
    fields: dict[str, object] = {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_mib": gpu.memory >> 20,
        "compute_capability": gpu.compute_capability,
        "numa_nodes": list(gpu.numa_nodes),
        "near_cores": core_list(gpu.cpus),
        "visible": gpu in devices.visible,
    }
    if gpu.mig is not None:
        fields["mig"] = [_describe(part, devices) for part in gpu.slices] if gpu.mig else "off"
    return fields


async def environment_report(config: LauncherConfig, environ: Mapping[str, str]) -> str:
    """Return the report as YAML, or as one line of JSON with --json-output. Secrets are masked."""
    report = describe_environment(await find_devices(environ)) | {"settings": masked(config)}
    return (
        json.dumps(report)
        if config.json_output
        else yaml.safe_dump(report, sort_keys=False, allow_unicode=True).strip()
    )


def _commit() -> str | None:
    """Return the commit of a package that pip installed from a repository; None if it is not known."""
    try:
        origin = json.loads(distribution("text-generation-trtllm").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    commit = origin.get("vcs_info", {}).get("commit_id")
    return None if commit is None else str(commit)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
