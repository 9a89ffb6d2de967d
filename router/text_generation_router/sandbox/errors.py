"""How a job in a sandbox can fail."""

from __future__ import annotations


class SandboxError(Exception):
    """The job answered with an error, or its worker died of it. `str()` is one line."""


class SandboxTimeout(SandboxError):
    """The job took too long; its worker was killed."""


class SandboxOutOfMemory(SandboxError):
    """The job wanted more memory than it may have; its worker was replaced."""
