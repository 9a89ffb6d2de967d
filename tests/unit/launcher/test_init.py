from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress

import psutil

PROGRAM = """
import ctypes, os, signal, sys, time
from text_generation_launcher.init import fork_from_init
SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0  # orphans come to this process, as to pid 1
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
fork_from_init()
if os.fork() == 0:
    orphan = os.fork()
    if orphan:
        print(orphan, flush=True)
    os._exit(0)
os.wait()
time.sleep(60)
"""


def test_orphans_are_reaped_signals_forwarded_and_the_exit_code_kept() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        with suppress(psutil.NoSuchProcess):
            psutil.Process(orphan).wait(10)  # a zombie would still exist
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 7
