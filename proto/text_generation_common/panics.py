"""Panics of Rust libraries as ordinary errors.

pyo3 raises a panic as PanicException. That is a BaseException, which `except Exception` does not catch: it would end a
process in place of a request.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from text_generation_common.one_line import one_line

P = ParamSpec("P")
T = TypeVar("T")


class PanicError(Exception):
    """A Rust library panicked. `str()` is one line."""


def as_exception(error: BaseException) -> Exception:
    """Return an error, a panic as PanicError. Raises cancellations and exits, which are not to be caught."""
    if isinstance(error, Exception):
        return error
    if type(error).__module__ in ("builtins", "asyncio.exceptions"):
        raise error
    return PanicError(f"a library failed: {one_line(error)}")


def without_backtrace(message: str) -> str:
    """Return an error message of llguidance without the backtrace or the state that it appends."""
    return message.split("<backtrace>")[0].split("<state>")[0].rstrip()


def without_panics(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that calls a Rust library: it raises PanicError in place of a panic."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001 - raised as an ordinary error
            raise as_exception(error) from None

    return call
