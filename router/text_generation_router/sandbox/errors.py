"""How a job in a sandbox can fail."""

from __future__ import annotations


class SandboxError(Exception):
    """The job answered with an error, or its worker died of it. `str()` is one line."""


class SandboxTimeout(SandboxError):
    """The job took too long; its worker was killed."""


class SandboxOutOfMemory(SandboxError):
    """The job wanted more memory than it may have; its worker was replaced."""


class SandboxCrashed(SandboxError):
    """The worker died, of the job or of something else."""


class SandboxBroken(SandboxError):
    """No worker can take the job: they cannot be started, or the sandbox is closed. The job itself was never looked at."""
