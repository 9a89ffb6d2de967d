"""The `text-generation-shard` command: parse settings, set up logs, serve, exit."""

import asyncio
import faulthandler
import os
import sys
import threading

from text_generation_common.command_line import parse_config
from text_generation_common.effective import print_own_config
from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_common.grammar_options import STACK_BYTES
from text_generation_common.lifeline import follow_parent
from text_generation_common.log import log
from text_generation_common.logs import configure_logging, drain_logs
from text_generation_common.resource_limits import apply_limits, log_unexpected
from text_generation_common.secrets import erase
from text_generation_common.sockets import remove_socket
from text_generation_proto.addresses import socket_path
from text_generation_shard.config import ShardConfig
from text_generation_shard.processes import descendants, kill

SPIN_COUNT = "3000"
"""Turns, about 0.1 ms, that a thread of a step on CPU spins before it sleeps until the others arrive. OpenMP's default is 300,000:
as fast with free cores, but with another program on one of two cores 16 streams of SmolLM2 got 150 instead of 190 tokens/s."""
SWITCH_INTERVAL = 0.0005
"""Seconds after which a busy thread releases the GIL. The engine's thread must not wait 5 ms, Python's default, for the thread
that writes its reports."""


def main() -> None:
    config = parse_config(ShardConfig)
    if config.print_config:
        print_own_config(config.process_name, config)
        return
    erase({"SHARD_TOKEN"})
    # Rank 0 also listens for its group while that connects.
    served = (config.address,) if config.rank else (config.group_address, config.address)
    paths = [path for path in map(socket_path, served) if path is not None]

    def leave_nothing() -> None:
        for path in paths:
            remove_socket(path)
        # Processes that an engine started are unknown to the launcher.
        kill(descendants())

    faulthandler.enable(2)  # sys.stderr may be None; the launcher ends a shard that hangs with SIGABRT
    sys.setswitchinterval(SWITCH_INTERVAL)
    threading.stack_size(STACK_BYTES)  # the default depends on `ulimit -s`
    follow_parent(config.lifeline_fd, cleanup=leave_nothing)
    configure_logging(config, config.process_name)
    apply_limits(parent_checked=config.lifeline_fd >= 0)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read while torch is loaded
    # Slow imports come after the start of the lifeline watch.
    from text_generation_shard.serve import serve

    async def serve_and_exit() -> None:
        try:
            code = await serve(config)
        except CannotServe as error:
            log.error("cannot serve", reason=str(error))
            code = ExitCode.FAILED
        except Exception as error:  # noqa: BLE001 - it is logged
            code = log_unexpected(error)
        leave_nothing()
        drain_logs()
        # Exit at once: an engine thread stuck in a device call must not keep the process alive, and an open health watch must
        # not be cancelled with a traceback from gRPC.
        os._exit(int(code))

    asyncio.run(serve_and_exit())


if __name__ == "__main__":
    main()
