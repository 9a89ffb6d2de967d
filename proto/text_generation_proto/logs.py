"""Log records, the same in every process: one constant event and fields, one record a line, on standard error.

The launcher forwards its children's lines as they are and parses nothing, so a record must never span lines.
"""

from __future__ import annotations

import logging
import sys

import structlog

from text_generation_proto.process import ProcessConfig


def configure_logging(config: ProcessConfig, process: str) -> None:
    """Set up structlog for this process. `process` names it in every record ("router", "shard-0", "launcher")."""
    structured: structlog.typing.Processor
    if config.json_output:
        structured = structlog.processors.JSONRenderer()
    else:
        # Tracebacks would span lines; the plain renderer writes them after the record, so they are flattened below.
        structured = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structured,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.log_level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
