"""Log records are one line of printable text of bounded length, in both formats; the last ones are written at the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

from text_generation_common.logs import COLOUR, MAX_TEXT_LENGTH, PLAIN_COLUMNS, VARIABLE

HOSTILE = "/\x1b[2J\0\x07\x7f\x9b1m\u202ea b\u2028\ud800\n"


SETUP = (
    "import structlog; from text_generation_common.logs import *; "
    "from text_generation_common.settings import ProcessConfig\n"
    "configure_logging(ProcessConfig(json_output={json_output}), 'router'); log = structlog.get_logger()\n"
)


def output_of(code: str, json_output: bool, *, exit_code: int = 0, **environ: str) -> str:
    """Return the output of a process that set up its log. Its two output streams are one pipe, as the launcher has it."""
    command = [sys.executable, "-c", SETUP.format(json_output=json_output) + code]
    process = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, env={**os.environ, **environ}
    )
    assert process.returncode == exit_code
    return process.stdout.decode()


@pytest.mark.parametrize("json_output", [False, True])
def test_a_traceback_is_part_of_its_record(json_output: bool) -> None:
    code = """
def fail(key):
    raise ValueError("two\\nlines")
try:
    fail("sk-secret")
except ValueError:
    log.exception("it failed", request_id=7)
"""
    [line] = output_of(code, json_output).splitlines()
    assert "it failed" in line
    assert "ValueError" in line
    assert "request_id" in line
    assert "sk-secret" not in line.replace('fail("sk-secret")', "")
    if json_output:
        assert json.loads(line)["process"] == "router"


def test_texts_of_clients_are_escaped_and_shortened() -> None:
    code = f"log.info('event', path={HOSTILE!r}, plain='/é', long='y' * 2_000_000)\n"
    code += "try: raise ValueError('z' * 2_000_000)\nexcept ValueError: log.exception('it failed')"
    for json_output in (False, True):
        record, failure = output_of(code, json_output).splitlines()
        assert record.isprintable()
        assert record.count("y") == MAX_TEXT_LENGTH
        assert "2000000 characters" in record
        assert len(failure) < 20_000
        if json_output:
            parsed: dict[str, Any] = json.loads(record)
            assert (parsed["path"], parsed["plain"]) == (HOSTILE, "/é")
            assert parsed["message"] == parsed["event"] == "event"
        else:
            assert f"path={HOSTILE!r} plain=/é" in record


@pytest.mark.parametrize("ending", ["log.info('last')", "log.info('last'); drain_logs(); import os; os._exit(0)"])
def test_the_last_records_are_written(ending: str) -> None:
    lines = output_of(f"for _ in range(2000): log.info('line')\n{ending}", json_output=False).splitlines()
    assert len(lines) == 2001
    assert "last" in lines[-1]


def test_other_output_is_written_too_and_an_uncaught_error() -> None:
    code = "import threading; print('printed'); t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); 1 / 0"
    text = output_of(code, json_output=False, exit_code=1)
    assert text.startswith("printed\n")
    assert text.count("ZeroDivisionError") == 2


def test_a_closed_standard_error_is_no_error() -> None:
    """No file or socket gets its number, and then log lines."""
    code = (
        "import os; os.close(2); from text_generation_common.logs import *; "
        "from text_generation_common.settings import ProcessConfig; configure_logging(ProcessConfig(), 'router'); "
        "structlog.get_logger().info('event'); assert open('/dev/null').fileno() > 2; drain_logs()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_console_output_without_colours_is_that_of_structlog() -> None:
    record: dict[str, Any] = {"timestamp": "2026-01-01T00:00:00Z", "level": "info", "event": "request finished"}
    record |= {"status": 200, "none": None, "zero": 0.0, "words": "a b", "quote": "it's", "pair": "a=b", "empty": ""}
    record |= {"list": ["a b"], "plain": "/é"}
    expected = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)
    for changed in ({}, {"level": "critical"}, {"event": "done"}):
        line = structlog.dev.ConsoleRenderer(columns=PLAIN_COLUMNS)(None, "info", {**record, **changed})
        assert line == expected(None, "info", {**record, **changed})


LEVELS = (
    "log.info('one', route='/', status=200)\nlog.warning('two'); log.error('three'); log.critical('four')\n"
    "try: 1 / 0\nexcept ZeroDivisionError: log.exception('five')"
)


@pytest.mark.parametrize("json_output", [False, True])
def test_records_for_the_journal_begin_with_their_priority_and_have_no_time(json_output: bool, tmp_path: Path) -> None:
    lines = output_of(LEVELS, json_output, JOURNAL_STREAM="8:1").splitlines()
    assert [line[:3] for line in lines] == ["<6>", "<4>", "<3>", "<2>", "<3>"]
    if json_output:
        assert json.loads(lines[0][3:])["message"] == "one"
    else:
        assert lines[0] == "<6>[info     ] one route=/ status=200 process=router"
    with (tmp_path / "log").open("w") as file:
        code = f"import os; os.dup2({file.fileno()}, 2)"
        from_shell = [sys.executable, "-c", f"{code}\n{SETUP.format(json_output=json_output)}{LEVELS}"]
        subprocess.run(
            from_shell, check=True, timeout=60, pass_fds=[file.fileno()], env=os.environ | {"JOURNAL_STREAM": "8:1"}
        )
    assert "<" not in {line[0] for line in (tmp_path / "log").read_text().splitlines()}


def test_every_process_has_the_colours_of_a_terminal() -> None:
    """A child has them because its launcher says so; the launcher itself sees that it writes to one."""
    child = output_of(LEVELS, json_output=False, **{VARIABLE: "terminal"})
    ours, theirs = os.openpty()
    code = f"import os; os.dup2({theirs}, 2)\n{SETUP.format(json_output=False)}{LEVELS}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, pass_fds=[theirs])
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode().replace("\r", "")
    os.close(ours)

    def form(text: str) -> str:
        return re.sub(r"\d{4}-[^ \x1b]*Z", "", text.splitlines()[0])

    assert form(child) == form(shown)
    assert COLOUR.search(child)
    assert "\x1b" not in COLOUR.sub("", child)
    assert "\x1b" not in output_of(LEVELS, json_output=False)
