"""Files beside Triton's cache that remember which kernels were compiled."""

import hashlib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
import triton


class CompiledMarker:
    """The file for kernels that depend on `known`, on the versions of libraries and on the device."""

    def __init__(self, device: torch.device, *known: object) -> None:
        versions = [version(name) for name in ("text-generation-trtllm", "flashinfer-python")]
        all_known = (*known, *versions, torch.__version__, triton.__version__, torch.cuda.get_device_name(device))
        digest = hashlib.sha256(repr(all_known).encode()).hexdigest()[:16]
        self._file = Path(triton.knobs.cache.dir) / f"text-generation-{digest}"

    def exists(self) -> bool:
        return self._file.exists()

    def create(self) -> None:
        """Remember the kernels; a cache that cannot be written remembers nothing."""
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
