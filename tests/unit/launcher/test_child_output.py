from __future__ import annotations

import asyncio
import json

import pytest

from text_generation_common import progress
from text_generation_common.logs import VARIABLE
from text_generation_common.progress import RELAYED
from text_generation_launcher.child import MAX_LINE_BYTES, forward_output, label

RECORD = b"2026-01-01T00:00:00Z [info     ] serving process=shard-0"
JSON_RECORD = b'{"event": "serving", "process": "shard-0"}'


def test_log_records_of_the_child_are_unchanged_and_other_lines_get_its_name() -> None:
    assert label(RECORD, "shard-0", json_output=False) == RECORD + b"\n"
    assert label(JSON_RECORD, "shard-0", json_output=True) == JSON_RECORD + b"\n"
    crash = b"Segmentation\tfault \xc3\xa9 \x1b[2J\xe2\x80\xae\xff"
    escaped = "Segmentation\tfault é \\x1b[2J\\u202e\\xff"
    assert label(crash, "shard-0", json_output=False) == f"shard-0: {escaped}\n".encode()
    assert label(b"process=shard-0 \x1b", "shard-0", json_output=False) == b"process=shard-0 \\x1b\n"
    assert b"\x1b" not in label(JSON_RECORD + b" \x1b", "shard-0", json_output=True)
    assert json.loads(label(b"Segmentation fault \xff", "shard-0", json_output=True)) == {
        "process": "shard-0",
        "level": "info",
        "event": "output",
        "message": "Segmentation fault \\xff",
        "text": "Segmentation fault \\xff",
    }


def test_priorities_and_on_a_terminal_colours_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = b"\x1b[2m2026\x1b[0m \x1b[36mprocess\x1b[0m=\x1b[35mshard-0\x1b[0m \x1b[8mhidden\x1b[2J"
    monkeypatch.setenv(VARIABLE, "terminal")
    shown = coloured.replace(b"\x1b[8m", b"\\x1b[8m").replace(b"\x1b[2J", b"\\x1b[2J")
    assert label(coloured, "shard-0", json_output=False) == shown + b"\x1b[0m\n"
    assert label(b"\x1b[31mred", "shard-0", json_output=False) == b"shard-0: \x1b[31mred\x1b[0m\n"
    monkeypatch.setenv(VARIABLE, "journal")
    assert b"\x1b" not in label(coloured, "shard-0", json_output=False)
    for record, json_output in ((RECORD, False), (JSON_RECORD, True)):
        assert label(b"<4>" + record, "shard-0", json_output=json_output) == b"<4>" + record + b"\n"
    assert label(b"<3>no record", "shard-0", json_output=False) == b"<3>shard-0: no record\n"


async def forwarded(capfdbinary: pytest.CaptureFixture[bytes], *chunks: bytes) -> list[bytes]:
    reader = asyncio.StreamReader()
    for chunk in chunks:
        reader.feed_data(chunk)
    reader.feed_eof()
    await forward_output(reader, "shard-0", json_output=False)
    return capfdbinary.readouterr().err.splitlines(keepends=True)


async def test_lines_are_joined_across_chunks(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    huge = b"x" * MAX_LINE_BYTES
    lines = await forwarded(capfdbinary, b"on", b"e\ntw", b"o\n\n", huge, b"\n", b"last line")
    assert lines == [b"shard-0: " + line + b"\n" for line in (b"one", b"two", b"", huge, b"last line")]


async def test_a_complete_line_is_forwarded_at_once(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    reader = asyncio.StreamReader()
    async with asyncio.TaskGroup() as tasks:
        forwarding = tasks.create_task(forward_output(reader, "shard-0", json_output=False))
        reader.feed_data(b"one\ntwo\nthr")
        for _ in range(3):  # let the forwarding task run
            await asyncio.sleep(0)
        assert capfdbinary.readouterr().err == b"shard-0: one\nshard-0: two\n"
        forwarding.cancel()


async def test_no_state_stays_of_a_child_whose_output_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(progress, "_displays", [shown.append])
    reader = asyncio.StreamReader()
    async with asyncio.TaskGroup() as tasks:
        forwarding = tasks.create_task(forward_output(reader, "shard-0", json_output=False))
        reader.feed_data(f"{RELAYED}loading\n".encode())
        for _ in range(3):
            await asyncio.sleep(0)
        assert shown == ["shard-0: loading"]
        forwarding.cancel()
    assert shown == ["shard-0: loading", ""]


async def test_overlong_lines_are_split(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = await forwarded(capfdbinary, b"x" * 10 * MAX_LINE_BYTES)
    assert max(map(len, lines)) < 3 * MAX_LINE_BYTES
    assert sum(line.count(b"x") for line in lines) == 10 * MAX_LINE_BYTES
