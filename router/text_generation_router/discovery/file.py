"""Members by a file: a YAML list of addresses."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import yaml

from text_generation_common.log import log
from text_generation_common.one_line import one_line
from text_generation_router.discovery.source import Address, Trouble, check_address

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the file of `file://`."""


_Version = tuple[int, int, int, int]


class FileSource:
    """Reads a file again when it changed: written, renamed over, or behind a symbolic link that was swapped."""

    def __init__(self, path: Path, every_s: float = LOOK_EVERY_S) -> None:
        self._path, self._every_s = path, every_s

    async def members(self) -> AsyncIterator[frozenset[Address]]:
        trouble = Trouble(f"file://{self._path}")
        seen: _Version | None = None
        while True:
            try:
                version, text = await asyncio.to_thread(_read, self._path, seen)
                if text is not None:
                    addresses = _parse(text)
                    trouble.answered()
                    yield addresses
                seen = version
            except (OSError, ValueError, yaml.YAMLError) as error:
                trouble.failed(one_line(error))
                seen = None
            await asyncio.sleep(self._every_s)


def _read(path: Path, seen: _Version | None) -> tuple[_Version, str | None]:
    """Return the version of the file and its text; None if that is the version `seen`."""
    status = path.stat()  # first: a change after it is seen the next time
    version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return version, None if version == seen else path.read_text()


def _parse(text: str) -> frozenset[Address]:
    """Return the addresses in a list. Raises ValueError, YAMLError."""
    entries = yaml.safe_load(text)
    if entries is None:
        return frozenset()
    if not isinstance(entries, list):
        raise ValueError("expected a list of addresses")
    addresses = set()
    for entry in entries:
        try:
            addresses.add(check_address(str(entry)))
        except ValueError as error:
            log.error("a member is left out", reason=str(error))
    return frozenset(addresses)
