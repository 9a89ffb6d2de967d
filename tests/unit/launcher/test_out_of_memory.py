from __future__ import annotations

import subprocess
import sys

import pytest

from text_generation_launcher.commands import memory_is_out

NO_THREAD = """
import resource, threading
from text_generation_launcher.commands import memory_is_out
resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, resource.RLIM_INFINITY))
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    print(memory_is_out(ExceptionGroup("tasks", [error])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux refuses threads beyond a limit of data")
def test_a_thread_that_the_system_refuses_counts_as_no_memory() -> None:
    assert subprocess.run([sys.executable, "-c", NO_THREAD], check=True, capture_output=True).stdout == b"True\n"


def test_other_errors_do_not() -> None:
    nested = ExceptionGroup("tasks", [ExceptionGroup("more", [MemoryError()]), ValueError()])
    assert memory_is_out(nested)
    assert not memory_is_out(ExceptionGroup("tasks", [RuntimeError("no such thread"), OSError()]))
