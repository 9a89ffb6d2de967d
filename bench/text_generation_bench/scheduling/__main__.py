"""Measure what the scheduler promises, end to end: the launcher, the router and shards as processes, a client beside.

python -m text_generation_bench.scheduling SUBCOMMAND --model FOLDER

    chats        a shared system prompt, users with several turns: time to first token and hit rate, reuse on and off
    replicas     the same over two replicas: dispatch by prefix against round robin
    long-prompt  a prompt of 2,000 tokens beside streams that decode: gaps between their tokens, its own first token
    tenants      one that floods beside a modest one: Jain's index of what they were served, and what fairness costs
    overload     Poisson arrivals at three times the peak: goodput, refusals, foretold waits
    kill         kill -9 of shards under streams: texts against those of an undisturbed run

Whoever else uses the machine is in every figure: each run says how much of the processors that was.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from text_generation_bench.scheduling import chats, kill, long_prompt, overload, tenants

COMMANDS = {
    "chats": (chats.chats, chats.add_arguments, "torch"),
    "replicas": (chats.replicas, chats.add_arguments, "torch"),
    "long-prompt": (long_prompt.long_prompt, long_prompt.add_arguments, "torch"),
    "tenants": (tenants.tenants, tenants.add_arguments, "echo"),
    "overload": (overload.overload, overload.add_arguments, "echo"),
    "kill": (kill.kill, kill.add_arguments, "echo"),
}


def main() -> None:
    """Run one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, add_arguments, engine) in COMMANDS.items():
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.add_argument("--model", type=Path, required=True, help="a model's folder")
        command.add_argument("--engine", default=engine)
        add_arguments(command)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is stopped in any case
    asyncio.run(COMMANDS[arguments.command][0](arguments))


if __name__ == "__main__":
    main()
