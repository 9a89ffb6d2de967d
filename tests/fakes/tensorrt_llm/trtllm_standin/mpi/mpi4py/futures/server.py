"""A worker process: lives until its standard input is closed."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.stdin.buffer.read()
