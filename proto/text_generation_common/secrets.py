"""Secrets in the environment: names that count as secret, and their removal from the process's own environment.

The environment with which a process was started stays readable in /proc/PID/environ. Erasing the values there, and
not making the process undumpable, leaves debuggers and profilers their work.
"""

import ctypes
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path

_SECRET = re.compile(
    r"(AWS|AZURE|GOOGLE|GCP)_.*|(.*_)?(TOKEN|KEY|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)|.*SECRET.*", re.IGNORECASE
)
_RUNTIME = re.compile(
    r"(NCCL|CUDA|CUDNN|CUBLAS|NVIDIA|NV|TRT|TRTLLM|TLLM|TENSORRT|TORCH|PYTORCH|TRITON|OMPI|PMIX|PMI|PRTE|SLURM|UCX|FI|GLOO|OMP"
    r"|MKL|KMP|GRPC|OTEL|PYTHON|LD)_.*"
)
"""Names of settings of libraries and MPI, which are never secret."""


PASSED_ON = frozenset({"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"})
"""Variables that may hold secrets and that all processes need. Each erases them once it has read them."""


def is_secret(name: str) -> bool:
    """Return True if an environment variable with this name holds a secret that no other process needs."""
    return _SECRET.fullmatch(name) is not None and _RUNTIME.fullmatch(name) is None


def erase_secrets() -> None:
    """Remove all secrets from this process's environment."""
    erase({name for name in os.environ if is_secret(name)} | PASSED_ON)


def erase(names: Collection[str]) -> None:
    """Remove variables from this process's environment, also from /proc/PID/environ (Linux)."""
    for name in names:
        os.environ.pop(name, None)
    if sys.platform != "linux":
        return
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    block = ctypes.string_at(start, end - start)
    position = 0
    for entry in block.split(b"\0"):
        if os.fsdecode(entry.partition(b"=")[0]) in names:
            ctypes.memset(start + position, 0, len(entry))
        position += len(entry) + 1
