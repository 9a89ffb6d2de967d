"""Resource limits of a process. A service manager may set them too low."""

import resource
from contextlib import suppress

from text_generation_common.exit_codes import ExitCode
from text_generation_common.log import log

MOST_DESCRIPTORS = 1 << 20
"""Highest soft limit set. Some programs close every descriptor up to the limit, and containers may allow a billion."""
LEAST = {"NOFILE": 64, "NPROC": 64}
"""Limits below which no process starts: a library would abort later, or each request fail."""
USUAL = {"AS": 1 << 62, "DATA": 1 << 62, "FSIZE": 1 << 62, "NOFILE": 1024, "NPROC": 1024, "STACK": 8 << 20}
"""Limits below which a start may fail."""


def apply_limits(*, parent_checked: bool = False) -> None:
    """Raise the soft limit of descriptors to the hard one, for child processes too. End this process if a limit is too low.

    Not if its parent has checked the limits: what the parent survives while it serves, its children should.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):  # refused in a sandbox: the old limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if not parent_checked and (too_low := _below(LEAST)):
        needed = " ".join(f"Limit{name}={least}" for name, least in LEAST.items())
        log.error("cannot start", reason=f"{too_low} is too low, and at least {needed} is needed")
        raise SystemExit(int(ExitCode.FAILED))


def low_limits() -> dict[str, str]:
    """Return a field for the log with the low resource limits of this process, by systemd's names; none if all are usual."""
    low = _below(USUAL)
    return {"low_limits": low} if low else {}


def _below(least: dict[str, int]) -> str:
    limits = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in least}
    return " ".join(f"Limit{name}={value}" for name, value in limits.items() if 0 <= value < least[name])


def log_unexpected(error: Exception) -> ExitCode:
    """Log an error that no handler expects, and return the exit code of the process."""
    if memory_is_out(error):
        log.error("no memory is left for a thread or a process", **low_limits())
        return ExitCode.FAILED
    log.error("bug", exc_info=error)
    return ExitCode.BUG


def memory_is_out(error: BaseException) -> bool:
    """Return True if the error, or one in its group, is that the system refused memory or a thread."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(memory_is_out, error.exceptions))
    # Python has no class of its own for a thread that cannot be started.
    no_thread = isinstance(error, RuntimeError) and str(error).startswith("can't start new thread")
    return no_thread or isinstance(error, MemoryError)
