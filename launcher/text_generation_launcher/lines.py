"""What children write, passed on line by line: whole lines, whatever is in them, each with its sender's name."""

from __future__ import annotations

import asyncio
import json
import os
import sys

LONGEST_LINE = 16 * 1024 * 1024
"""Bytes kept in memory while a line's end has not come; a longer one is cut."""


class Forwarder:
    """Writes a child's lines to this process's standard error."""

    def __init__(self, name: str, *, json_output: bool) -> None:
        self._name = name
        self._json_output = json_output

    async def forward(self, reader: asyncio.StreamReader) -> None:
        """Pass on lines until the child and all it started have closed their end."""
        line = bytearray()
        while chunk := await reader.read(1 << 16):
            line += chunk
            if b"\n" in chunk:
                end = line.rindex(b"\n")
                self._write(bytes(line[:end]))
                del line[: end + 1]
            elif len(line) > LONGEST_LINE:
                self._write(bytes(line))
                line.clear()
        if line:  # last words without a line's end
            self._write(bytes(line))

    def _write(self, lines: bytes) -> None:
        labelled = b"".join(label(line, self._name, json_output=self._json_output) for line in lines.split(b"\n"))
        try:
            sys.stderr.buffer.write(labelled)
            sys.stderr.buffer.flush()
        except BrokenPipeError:
            # Whoever read our log has gone. Serving goes on; there is nobody left to tell.
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, sys.stderr.fileno())
            os.close(silence)


def label(line: bytes, name: str, *, json_output: bool) -> bytes:
    """The line with its end, and with the sender's name if it is no record of ours, which has it already."""
    line = line.removesuffix(b"\r")
    if json_output:
        if line.startswith(b"{") and f'"process": "{name}"'.encode() in line.replace(b'":"', b'": "'):
            return line + b"\n"
        text = line.decode(errors="backslashreplace")
        return json.dumps({"process": name, "level": "info", "event": "output", "text": text}).encode() + b"\n"
    if f"process={name}".encode() in line:
        return line + b"\n"
    return f"{name}: ".encode() + line + b"\n"
