"""Log records of every process: a constant event and fields, one record per line, on standard error.

The launcher forwards its children's lines without parsing them, so a record must not span lines.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import TextIO

import structlog

from text_generation_proto.settings import ProcessConfig


def configure_logging(config: ProcessConfig, process: str) -> None:
    """Set up structlog for this process. `process` names it in every record ("router", "shard-0", "launcher")."""
    structured: tuple[structlog.typing.Processor, ...]
    if config.json_output:
        structured = (structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer())
    else:
        structured = (
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), pad_event_to=0, exception_formatter=_write_traceback_on_one_line
            ),
        )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *structured,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.log_level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


def _write_traceback_on_one_line(record: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    record.write(f" traceback={''.join(traceback.format_exception(*exc_info))!r}")
