"""`text-generation-shard`: parse, set up logs, serve, exit code."""

from __future__ import annotations

import asyncio
import os
import sys

import structlog

from text_generation_proto.exit_codes import CannotServe, ExitCode
from text_generation_proto.lifeline import follow_parent
from text_generation_proto.logs import configure_logging
from text_generation_proto.settings import parse_config
from text_generation_proto.sockets import remove_socket, socket_path
from text_generation_shard.config import ShardConfig
from text_generation_shard.processes import descendants, kill

log = structlog.get_logger()


SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that computes lets another in. The engine's must not wait 5 ms, Python's default, for the one
that writes its reports."""


def main() -> None:
    """Run a shard until it is told to stop."""
    config = parse_config(ShardConfig)
    # Rank 0 listens for its group as well, while that gathers.
    served = (config.address,) if config.rank else (config.group_address, config.address)
    paths = [path for path in map(socket_path, served) if path is not None]

    def leave_nothing() -> None:
        for path in paths:
            remove_socket(path)
        # What an engine has started: nobody else knows of it.
        kill(descendants())

    sys.setswitchinterval(SWITCH_INTERVAL)
    follow_parent(config.lifeline_fd, cleanup=leave_nothing)
    configure_logging(config, config.process_name)
    # Only now what takes its time to import: the lifeline is being watched.
    from text_generation_shard.serve import serve

    async def serve_and_exit() -> None:
        try:
            code = await serve(config)
        except CannotServe as error:
            log.error("cannot serve", reason=str(error))
            code = ExitCode.FAILED
        except Exception:
            log.exception("bug")
            code = ExitCode.BUG
        leave_nothing()
        sys.stderr.flush()
        # At once: an engine thread stuck in a device call must not keep the process, nor a health watch that is still
        # open be cancelled with a traceback of gRPC's.
        os._exit(int(code))

    asyncio.run(serve_and_exit())


if __name__ == "__main__":
    main()
