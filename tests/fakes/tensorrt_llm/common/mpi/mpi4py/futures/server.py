"""A worker process: lives until the process that its standard input comes from has gone."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.stdin.buffer.read()
