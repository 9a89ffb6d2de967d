"""Threads of a shard."""

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any


def daemon_thread(run: Callable[..., Any], name: str, *args: object) -> threading.Thread:
    """Return a thread, not started, that does not keep the process alive; its log records have the fields bound here."""
    return threading.Thread(target=copy_context().run, args=(run, *args), name=name, daemon=True)
