"""Start text-generation-launcher with the given arguments, and print how to call it once it is ready.

Ctrl-C reaches only the launcher, which stops gracefully, so that `make run` ends with its exit code, 0.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prepare_demo_model import MODELS

READY = re.compile(rb"\] ready (?=.*\bprocess=launcher\b).*\burl=(?P<url>\S+)")
"""The launcher's line; the order of its fields is that of the library of logs."""
PROMPT = "The capital of France is"
"""For a model that is not a demo model."""


def main() -> int:
    """Run the launcher; return its exit code."""
    launcher = Path(sys.executable).with_name("text-generation-launcher")
    # In its own process group: it gets exactly one signal per Ctrl-C, the one forwarded below.
    command = [str(launcher), *sys.argv[1:]]
    folder = Path(sys.argv[sys.argv.index("--model-id") + 1])
    prompt = MODELS[folder.name].prompt if folder.name in MODELS else PROMPT
    with foreground(), subprocess.Popen(command, stderr=subprocess.PIPE, process_group=0) as process:
        assert process.stderr is not None
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, lambda received, _frame: process.send_signal(received))
        for line in process.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            if match := READY.search(line):
                print(how_to_call(match["url"].decode(), prompt), flush=True)
        return process.wait()


def how_to_call(url: str, prompt: str) -> str:
    """Return a curl command."""
    body = f'{{"inputs": "{prompt}", "parameters": {{"max_new_tokens": 32}}}}'
    return f"\nReady. In another terminal:\n\n  curl {url}/generate -H 'Content-Type: application/json' \\\n    -d '{body}'\n"


@contextmanager
def foreground() -> Iterator[None]:
    """Take the terminal from make, and return it: make would report Ctrl-C as a failure."""
    if not (sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()):
        yield
        return
    make = os.getpgrp()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # sent to a process that takes the terminal
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would stop this process but not make
    os.setpgid(0, 0)
    os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
    try:
        yield
    finally:
        os.tcsetpgrp(sys.stdin.fileno(), make)


if __name__ == "__main__":
    sys.exit(main())
