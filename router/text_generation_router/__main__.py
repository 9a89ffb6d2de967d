"""The `text-generation-router` command."""

import faulthandler
import sys

from text_generation_common.command_line import parse_config
from text_generation_common.effective import print_own_config
from text_generation_common.exit_codes import CannotServe, ExitCode, first_error
from text_generation_common.lifeline import follow_parent
from text_generation_common.log import log
from text_generation_common.logs import configure_logging
from text_generation_common.resource_limits import apply_limits, log_unexpected
from text_generation_common.secrets import erase
from text_generation_common.stop_signals import run_to_end
from text_generation_router.config import RouterConfig

SWITCH_INTERVAL_S = 0.0005
"""Seconds after which a busy thread releases the GIL: the event loop must not wait 5 ms, Python's default, for the thread
that parses large bodies, each time that it wakes."""


def main() -> None:
    """Run a router until a stop signal; exit with an ExitCode."""
    config = parse_config(RouterConfig)
    if config.print_config:
        print_own_config("router", config)
        return
    erase({"API_KEY", "SHARD_TOKEN"})
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    faulthandler.enable(2)  # sys.stderr may be None; the launcher ends a router that hangs with SIGABRT
    follow_parent(config.lifeline_fd)
    configure_logging(config, config.process_name)
    apply_limits(parent_checked=config.lifeline_fd >= 0)
    # Slow imports come after the lifeline is watched.
    import uvloop

    from text_generation_router.serve import serve

    try:
        code = run_to_end(serve(config), uvloop.new_event_loop)
    except* CannotServe as group:
        log.error("cannot serve", reason=str(first_error(group)))
        code = ExitCode.FAILED
    except* Exception as group:  # noqa: BLE001 - it is logged
        code = log_unexpected(group)
    sys.exit(int(code))


if __name__ == "__main__":
    main()
