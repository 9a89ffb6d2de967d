"""Measure the effects of scheduling end to end, with launcher, router and shards as processes.

python -m text_generation_bench.scheduling SUBCOMMAND --model FOLDER

    chats        users with several turns and a shared system prompt: TTFT and hit rate with and without prefix cache
    replicas     the same with two replicas: dispatch by prefix, round-robin and least-loaded
    long-prompt  a prompt of 2,000 tokens beside decoding streams: their ITL and its TTFT
    tenants      a flooding tenant beside a modest one: Jain's index of their service, and the cost of fairness
    overload     Poisson arrivals at three times the peak: goodput, rejections, Retry-After
    kill         kill -9 of shards while streaming: texts compared with those of an undisturbed run

Other programs on the machine affect every result: each run reports their processor use.
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
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, add_arguments, engine) in COMMANDS.items():
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.add_argument("--model", type=Path, required=True, help="folder of the model")
        command.add_argument("--engine", default=engine)
        add_arguments(command)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is stopped too
    asyncio.run(COMMANDS[arguments.command][0](arguments))


if __name__ == "__main__":
    main()
