"""KeptBytes: what is written last is read, also where files may not be large."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from text_generation_router.metrics.kept import KeptBytes


def test_the_last_bytes_are_kept_in_little_memory() -> None:
    fd = os.memfd_create("kept")
    for number in range(20):
        body = bytes([number]) * (1000 + 300 * (number % 3))
        KeptBytes(fd).write(body)
        assert KeptBytes(fd).read() == body
    assert os.fstat(fd).st_size < 4096 + 4 * 1600


@pytest.mark.parametrize("limit", [0, 1, 4095, 4096, 4500, 8192, 1 << 30])
def test_a_limit_on_the_size_of_files_is_survived(limit: int) -> None:
    program = f"""
import resource
from text_generation_router.metrics.kept import KeptBytes
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
kept, written = KeptBytes(-1), [b"", b"a" * 900, b"b" * 900, b"c" * 1200]
for body in written:
    kept.write(body)
    assert kept.read() in written
assert {limit} < 8192 or kept.read() == body
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("counters are not kept") == (limit < 8192), done.stdout
