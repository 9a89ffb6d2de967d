from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from text_generation_common.resource_limits import memory_is_out

NO_THREAD = """
import resource, threading
from text_generation_common.resource_limits import memory_is_out
resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, resource.RLIM_INFINITY))
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    print(memory_is_out(ExceptionGroup("tasks", [error])))
"""
NO_THREAD_FOR_THE_LOG = """
import resource, sys, threading
from text_generation_launcher.commands import run
threading.stack_size(1 << 29)
used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 28), resource.RLIM_INFINITY))
run()
"""
NO_MEMORY_FOR_A_FILE = """
import resource, runpy, sys
def refuse(event, values):
    if event == "open" and str(values[0]).endswith("tokenizer.json"):
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
sys.addaudithook(refuse)
runpy.run_module({module!r}, run_name="__main__")
"""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux refuses threads beyond a limit of data")


def last_line(*command: str) -> str:
    """Return the last line of a process that ends with FAILED and no traceback."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout.splitlines()[-1]


@LINUX
def test_a_thread_that_the_system_refuses_counts_as_no_memory() -> None:
    assert subprocess.run([sys.executable, "-c", NO_THREAD], check=True, capture_output=True).stdout == b"True\n"


def test_other_errors_do_not() -> None:
    nested = ExceptionGroup("tasks", [ExceptionGroup("more", [MemoryError()]), ValueError()])
    assert memory_is_out(nested)
    assert not memory_is_out(ExceptionGroup("tasks", [RuntimeError("no such thread"), OSError()]))


@pytest.mark.parametrize("name", ["launcher", "router", "shard"])
def test_no_process_starts_under_limits_that_no_library_survives(name: str, demo_model: Path) -> None:
    flags = {"launcher": "--model-id", "router": "--shards unix:///none --model-path", "shard": "--model-path"}[name]
    command = f"ulimit -n 63 -u 62; exec {sys.executable} -m text_generation_{name} {flags} {demo_model}"
    assert "LimitNOFILE=63 LimitNPROC=62 is too low" in last_line("bash", "-c", command)


@LINUX
def test_a_launcher_whose_log_gets_no_thread_names_the_limit(demo_model: Path) -> None:
    line = last_line(sys.executable, "-c", NO_THREAD_FOR_THE_LOG, "--model-id", str(demo_model))
    assert "no memory is left" in line
    assert "LimitDATA=" in line


@LINUX
@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("text_generation_shard", "--engine echo --model-path"),
        ("text_generation_router", "--shards unix:///none --model-path"),
    ],
)
def test_a_process_without_memory_names_the_limit(module: str, flags: str, demo_model: Path) -> None:
    code = NO_MEMORY_FOR_A_FILE.format(module=module)
    line = last_line(sys.executable, "-c", code, *flags.split(), str(demo_model))
    assert "no memory is left" in line
    assert f"LimitAS={1 << 20}" in line
