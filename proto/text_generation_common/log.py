"""The logger of all modules. `logs.configure_logging` sets it up."""

import structlog

log = structlog.get_logger()
