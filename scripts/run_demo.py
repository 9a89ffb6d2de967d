"""Start text-generation-launcher with the given arguments, and say how to call it once it is ready.

Ctrl-C reaches the launcher alone, which stops in order; so `make run` ends with its exit code, 0.
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

READY = re.compile(rb"\] ready .*process=launcher .*url=(?P<url>\S+)")
PROMPT = "<|im_start|>user\\nWhat is the capital of France?<|im_end|>\\n<|im_start|>assistant\\n"


def main() -> int:
    """Entry point."""
    launcher = Path(sys.executable).with_name("text-generation-launcher")
    # A group of its own: it is to get one signal for one Ctrl-C, the one that is passed on below.
    command = [str(launcher), *sys.argv[1:]]
    with foreground(), subprocess.Popen(command, stderr=subprocess.PIPE, process_group=0) as process:
        assert process.stderr is not None
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, lambda received, _frame: process.send_signal(received))
        for line in process.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            if match := READY.search(line):
                print(how_to_call(match["url"].decode()), flush=True)
        return process.wait()


def how_to_call(url: str) -> str:
    """A curl line to paste."""
    body = f'{{"inputs": "{PROMPT}", "parameters": {{"max_new_tokens": 32}}}}'
    return f"\nReady. In another terminal:\n\n  curl {url}/generate -H 'Content-Type: application/json' \\\n    -d '{body}'\n"


@contextmanager
def foreground() -> Iterator[None]:
    """Take the terminal from make, and give it back: make would call a stop by Ctrl-C a failure."""
    if not (sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()):
        yield
        return
    make = os.getpgrp()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # which is what a process gets that takes the terminal
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would stop us and not make, and leave nobody at the terminal
    os.setpgid(0, 0)
    os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
    try:
        yield
    finally:
        os.tcsetpgrp(sys.stdin.fileno(), make)


if __name__ == "__main__":
    sys.exit(main())
