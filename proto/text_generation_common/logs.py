"""Log records of every process: a constant event and fields, one record per line, on standard error.

The launcher forwards its children's lines without parsing them, so a record must not span lines. Everything that
Python writes to standard error, the log and the rest, goes through a LogWriter: no reader of the log can stop a process.
"""

import atexit
import io
import logging
import os
import re
import stat
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from enum import StrEnum
from typing import Any, TextIO

import structlog

from text_generation_common.log_writer import LogWriter
from text_generation_common.progress import RELAYED, use_display
from text_generation_common.settings import ProcessConfig

MAX_TEXT_LENGTH = 1024
"""Characters of a text in a record, except for a traceback. The rest is left out: it may come from a client."""
MAX_TRACEBACK_LENGTH = 16 * 1024
"""Characters of a traceback in console output. Its middle is left out."""

VARIABLE = "TEXT_GENERATION_LOG_READER"
"""Environment variable by which a launcher tells a child where its lines end up."""
PRIORITIES = {"critical": "<2>", "error": "<3>", "warning": "<4>", "info": "<6>", "debug": "<7>"}
"""Starts of lines in systemd's journal, by level: see sd-daemon(3)."""
COLOUR = re.compile(r"(\x1b\[(?:[0-2]|[39][0-7])m)")
"""The control sequences of coloured records."""

_writers: list[LogWriter] = []
"""The writer of this process, once `configure_logging` was called."""


class LogReader(StrEnum):
    """The reader of standard error. It decides the form of a record that is not JSON."""

    TERMINAL = "terminal"
    """Records have colours."""
    JOURNAL = "journal"
    """Systemd's journal: records begin with their priority and have no time, which it adds itself."""
    OTHER = "other"


def log_reader() -> LogReader:
    """Return the reader of standard error, for a child the one of its launcher's."""
    if told := os.environ.get(VARIABLE):
        return LogReader(told)
    mode = os.fstat(2).st_mode
    if os.isatty(2):
        return LogReader.TERMINAL
    # Not a file: a shell inherits the variable from its session.
    to_journal = "JOURNAL_STREAM" in os.environ and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode))
    return LogReader.JOURNAL if to_journal else LogReader.OTHER


def configure_logging(config: ProcessConfig, process: str) -> None:
    """Set up structlog and standard error. `process` names this process in every record: "router", "shard-0", "launcher"."""
    _open_standard_error()
    reader = log_reader()

    def name_process(_logger: object, _method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        record["process"] = process
        return record

    def report(lines: int) -> bytes:
        record: Any = {"event": "log lines dropped", "lines": lines}
        for processor in processors:
            record = processor(None, "warning", record)
        return f"{record}\n".encode(errors="backslashreplace")

    structured: tuple[structlog.typing.Processor, ...]
    if config.json_output:
        # Not the values of local variables: they contain prompts and keys.
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        tracebacks = structlog.processors.ExceptionRenderer(transformer)
        structured = (_timestamp, tracebacks, shorten_texts, _add_message, structlog.processors.JSONRenderer())
    else:
        form: Any = {"sort_keys": False, "exception_formatter": _write_traceback_on_one_line}
        form |= {"colors": True, "pad_event_to": 0} if reader is LogReader.TERMINAL else {"columns": PLAIN_COLUMNS}
        timestamp = () if reader is LogReader.JOURNAL else (_timestamp,)
        structured = (*timestamp, shorten_texts, _quote_control_characters, structlog.dev.ConsoleRenderer(**form))
    priority = (lambda _, method, record: f"{PRIORITIES[method]}{record}",) if reader is LogReader.JOURNAL else ()
    processors: tuple[structlog.typing.Processor, ...] = (
        name_process,
        structlog.processors.add_log_level,
        *structured,
        *priority,
    )
    writer = LogWriter(2, report)
    _writers.append(writer)
    atexit.register(drain_logs)
    shares_output = sys.stdout is not None and os.path.sameopenfile(1, 2)
    sys.stderr = io.TextIOWrapper(writer, "utf-8", "backslashreplace", line_buffering=True)
    if shares_output:
        sys.stdout = sys.stderr
    if config.json_output or reader is not LogReader.TERMINAL:
        pass  # progress goes to the log
    elif VARIABLE not in os.environ:
        use_display(writer.show_status)
    else:
        use_display(lambda text: print(f"{RELAYED}{text}", file=sys.stderr))  # noqa: T201 - a line for the launcher
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.log_level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def drain_logs() -> None:
    """Wait until the log is written, for a short time at most. Call it before `os._exit`."""
    for writer in _writers:
        sys.stderr.flush()
        writer.drain()


def dropped_lines() -> int:
    """Return the number of lines that this process could not write to its log."""
    return sum(writer.dropped for writer in _writers)


def escape(text: str) -> str:
    """Return a line of text with escapes for everything but printable characters and tabs.

    Control characters change what a terminal shows. So do marks that reverse the direction of text.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\t" else character.encode("unicode_escape").decode()
        for character in text
    )


def shorten_texts(_logger: object, _method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Cut long texts in a record: a structlog processor."""
    for name, value in record.items():
        record[name] = _shortened(value)
    return record


def _shortened(value: object) -> object:
    match value:
        case int() | float():  # first, because the test for a mapping takes long
            return value
        case str() if len(value) > MAX_TEXT_LENGTH:
            return f"{value[:MAX_TEXT_LENGTH]}… ({len(value)} characters)"
        case Mapping():
            return {name: _shortened(each) for name, each in value.items()}
        case list():
            return [_shortened(each) for each in value]
        case _:
            return value


_timestamp = structlog.processors.TimeStamper(fmt="iso", utc=True)


def _add_message(_logger: object, _method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Repeat the event under the name that readers of JSON logs show as the text of a line."""
    record["message"] = record["event"]
    return record


class _Quoted:
    """A text that the console renderer writes with quotes and escapes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)


def _quote_control_characters(
    _logger: object, _method: str, record: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for name, value in record.items():
        if isinstance(value, str) and not value.isprintable():
            record[name] = _Quoted(value)
    return record


def _plain(value: object) -> str:
    if isinstance(value, str) and _QUOTED.isdisjoint(value):
        return value
    return repr(value)


_QUOTED = frozenset(" \t=\r\n\"'")
PLAIN_COLUMNS = [
    structlog.dev.Column("timestamp", lambda _, value: str(value)),
    structlog.dev.Column("level", lambda _, value: f"[{value:<9}]"),
    structlog.dev.Column("event", lambda _, value: str(value)),
    structlog.dev.Column("", lambda name, value: f"{name}={_plain(value)}"),
]
"""The columns of console output without colours: as structlog's own, which take three times as long."""


def _write_traceback_on_one_line(record: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    text = "".join(traceback.format_exception(*exc_info))
    if len(text) > MAX_TRACEBACK_LENGTH:
        half = MAX_TRACEBACK_LENGTH // 2
        text = f"{text[:half]}\n…\n{text[-half:]}"
    record.write(f" traceback={text!r}")


def _open_standard_error() -> None:
    """Open standard error if it is closed: otherwise the next file or socket would get its number, and log lines."""
    try:
        os.fstat(2)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != 2:
            os.dup2(nowhere, 2)
            os.close(nowhere)
