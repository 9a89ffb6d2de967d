"""kill -9 of shards under streams: every text is to be the one of an undisturbed run."""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import aiohttp

from text_generation_bench.scheduling.client import Answer, client, generate, metrics, verdict
from text_generation_bench.scheduling.server import Busy, Server, serving

RETURN_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=120)
    parser.add_argument("--step-ms", type=float, default=15, help="of the echo engine")
    parser.add_argument("--single-kills", type=int, default=3, help="with one shard")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flag", action="append", default=[], help="a further flag for the launcher")


async def kill(arguments: argparse.Namespace) -> None:
    """Two shards, then one."""
    for replicas, kills in ((2, arguments.kills), (1, arguments.single_kills)):
        await play(arguments, replicas, kills)


async def play(arguments: argparse.Namespace, replicas: int, kills: int) -> None:
    """`kills` rounds with so many replicas."""
    engine = ["--engine=echo", f"--echo-step-ms={arguments.step_ms}"]
    if arguments.engine != "echo":
        engine = [f"--engine={arguments.engine}", "--dtype=float32", f"--num-threads={2 // replicas}"]
    flags = (*engine, f"--num-replicas={replicas}", "--max-shard-restarts=1000", *arguments.flag)
    draw = random.Random(arguments.seed)
    bad = 0
    async with serving(arguments.model, *flags) as server, client() as session:
        await wave(arguments, server, session)
        busy, started = Busy(server), time.monotonic()
        undisturbed = await wave(arguments, server, session)
        took = time.monotonic() - started
        assert not any(one.error for one in undisturbed), [one.error for one in undisturbed if one.error][:3]
        print(
            f"{replicas} shards: undisturbed {took:.1f} s, longest gap {longest_gap(undisturbed):.2f} s; {busy.line()}"
        )
        for number in range(kills):
            before = await metrics(session, server.url)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(wave(arguments, server, session))
                await asyncio.sleep(took * draw.uniform(0.1, 0.8))
                draw.choice(server.shards()).kill()
                killed = time.monotonic()
            answers = running.result()
            failed = [one.error for one in answers if one.error]
            pairs = zip(answers, undisturbed, strict=True)
            other = [place for place, (one, base) in enumerate(pairs) if not one.error and not same(one, base)]
            back = await until_all_serve(server, session, replicas) - killed
            after = await metrics(session, server.url)
            moved = after["text_generation_request_moves_total"] - before["text_generation_request_moves_total"]
            print(
                f"kill {number + 1:3}: {len(failed)} failed, {len(other)} different, {moved:.0f} moved, longest gap "
                f"{longest_gap(answers):.2f} s, back within {back:.1f} s {failed[:1]} {other[:5]}",
                flush=True,
            )
            bad += len(failed) + len(other)
    print(f"{replicas} shards, {kills} kills: {bad} streams failed or different: {verdict(holds=bad == 0)}")


async def wave(arguments: argparse.Namespace, server: Server, session: aiohttp.ClientSession) -> list[Answer]:
    """All streams at once, every second one sampled with a seed."""
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                generate(
                    session,
                    server.url,
                    f"Number {place} of the stories that begin with the word {place * 7} is about",
                    {"max_new_tokens": arguments.new_tokens}
                    | ({"do_sample": True, "temperature": 0.9, "seed": place + 1} if place % 2 else {}),
                )
            )
            for place in range(arguments.streams)
        ]
    return [task.result() for task in running]


def same(one: Answer, other: Answer) -> bool:
    """Token by token, and in the text."""
    return one.ids == other.ids and one.text == other.text


def longest_gap(answers: list[Answer]) -> float:
    """Seconds without a token of any stream that had begun."""
    return max((gap for one in answers for gap in one.gaps), default=0.0)


async def until_all_serve(server: Server, session: aiohttp.ClientSession, replicas: int) -> float:
    """When every replica served again, or could be seen to. Raises TimeoutError."""
    async with asyncio.timeout(RETURN_S):
        while True:
            figures = await metrics(session, server.url)
            if figures["text_generation_replicas_serving"] == replicas:
                return time.monotonic()
            await asyncio.sleep(0.05)
