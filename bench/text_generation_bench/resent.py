"""Measure the router's CPU time for one more turn of a chat that is resent with each turn, with the echo engine.

    python -m text_generation_bench.resent --model FOLDER

Prints for each length of chat, in tokens, the CPU time of a turn in the router and in the processes that render templates.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import orjson
import psutil

from text_generation_bench.load.http_client import HttpClient
from text_generation_bench.router_processes import cpu_seconds, servers

MESSAGE_TOKENS = 500
"""About the length of a message: that of a result of a tool, or of a page of text."""
TOKENS_PER_WORD = 1.32
"""About the characters of a token of SmolLM2's tokenizer in these texts."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder with a tokenizer.json")
    parser.add_argument("--lengths", default="1000,10000,100000", help="tokens of chats")
    parser.add_argument("--turns", default=20, type=int, help="turns of a chat that are measured")
    parser.add_argument("--rounds", default=3, type=int, help="chats of each length")
    arguments = parser.parse_args()
    print("tokens   router, ms   templates, ms   first turn, ms   (medians of the chats)")
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with servers(arguments.model, 0, "--echo-max-sequence-length=262144") as (router, port, _):
        helpers = [child.pid for child in psutil.Process(router).children(recursive=True)]
        asyncio.run(measure(port, router, helpers, [300], 20, 1))  # the first requests cost more
        for length in lengths:
            times = asyncio.run(measure(port, router, helpers, [length] * arguments.rounds, arguments.turns, length))
            medians = [statistics.median(column) * 1e3 for column in zip(*times, strict=True)]
            print("{:6}   {:10.2f}   {:13.2f}   {:14.2f}".format(length, *medians), flush=True)


async def measure(
    port: int,
    router: int,
    helpers: Sequence[int],
    lengths: Sequence[int],
    turns: int,
    seed: int,
) -> list[tuple[float, float, float]]:
    """Return the seconds of router and helpers for one turn, and of the router for the first, of a chat of each length."""
    client, source = HttpClient(f"http://127.0.0.1:{port}", {}, None, 600.0), random.Random(seed)
    times = []
    for length in lengths:
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": text_of(source, MESSAGE_TOKENS)}
            for number in range(length // MESSAGE_TOKENS | 1)
        ]

        async def turn(messages: list[dict[str, str]] = messages) -> None:
            body = orjson.dumps({"model": "m", "messages": messages, "max_tokens": 1})
            response = await client.post("/v1/chat/completions", body, lambda stamp, part: None)
            assert response.status == 200, response.error_body[:200]

        before = cpu_seconds(router)
        await turn()
        first, before, before_helpers = (
            cpu_seconds(router) - before,
            cpu_seconds(router),
            sum(map(cpu_seconds, helpers)),
        )
        for _ in range(turns):
            messages.append({"role": "assistant", "content": "I see."})
            messages.append({"role": "user", "content": f"Then go on, please, from {source.random()}."})
            await turn()
        spent = (cpu_seconds(router) - before, sum(map(cpu_seconds, helpers)) - before_helpers)
        times.append((spent[0] / turns, spent[1] / turns, first))
    return times


def text_of(source: random.Random, tokens: int) -> str:
    """Return a random text of about so many tokens."""
    return " ".join(source.choices(WORDS, k=round(tokens / TOKENS_PER_WORD)))


SOURCE = (
    "the of a to in is it for that with as on be this are from by not or an at we can has have which its was were "
    "file error line value test result number, first second return. function name: path list (open) close read write "
    "server client token model memory request answer process 1 2 10 2026 x = y + z; // see\n\n- item\n\tpass"
)
WORDS = SOURCE.split(" ")


if __name__ == "__main__":
    main()
