"""kill -9 of shards while streaming: every text must equal that of an undisturbed run."""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import aiohttp

from text_generation_bench.scheduling.client import Completion, client, generate, metrics, verdict
from text_generation_bench.scheduling.server import BenchServer, CpuUsage, serving

RETURN_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=120)
    parser.add_argument("--step-ms", type=float, default=15, help="step time of the echo engine")
    parser.add_argument("--single-kills", type=int, default=3, help="with one shard")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flag", action="append", default=[], help="additional flag for the launcher")


async def kill(arguments: argparse.Namespace) -> None:
    """Run with two shards, then with one."""
    for replicas, kills in ((2, arguments.kills), (1, arguments.single_kills)):
        await run_rounds(arguments, replicas, kills)


async def run_rounds(arguments: argparse.Namespace, replicas: int, kills: int) -> None:
    """Run `kills` rounds with `replicas` replicas."""
    engine = ["--engine=echo", f"--echo-step-ms={arguments.step_ms}"]
    if arguments.engine != "echo":
        engine = [f"--engine={arguments.engine}", "--dtype=float32", f"--num-threads={2 // replicas}"]
    flags = (*engine, f"--num-replicas={replicas}", "--max-shard-restarts=1000", *arguments.flag)
    draw = random.Random(arguments.seed)
    bad = 0
    async with serving(arguments.model, *flags) as server, client() as session:
        await run_streams(arguments, server, session)
        usage, started = CpuUsage(server), time.monotonic()
        undisturbed = await run_streams(arguments, server, session)
        duration = time.monotonic() - started
        assert not any(answer.error for answer in undisturbed), [
            answer.error for answer in undisturbed if answer.error
        ][:3]
        print(
            f"{replicas} shards: undisturbed {duration:.1f} s, longest gap {longest_gap(undisturbed):.2f} s; {usage.line()}"
        )
        for number in range(kills):
            before = await metrics(session, server.url)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(run_streams(arguments, server, session))
                await asyncio.sleep(duration * draw.uniform(0.1, 0.8))
                draw.choice(server.shards()).kill()
                killed = time.monotonic()
            answers = running.result()
            failed = [answer.error for answer in answers if answer.error]
            pairs = zip(answers, undisturbed, strict=True)
            other = [place for place, (answer, base) in enumerate(pairs) if not answer.error and not same(answer, base)]
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


async def run_streams(
    arguments: argparse.Namespace, server: BenchServer, session: aiohttp.ClientSession
) -> list[Completion]:
    """Run all streams at once; every second one is sampled with a seed."""
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


def same(first: Completion, second: Completion) -> bool:
    """Return True if token ids and texts are equal."""
    return first.ids == second.ids and first.text == second.text


def longest_gap(answers: list[Completion]) -> float:
    """Return the longest time between two tokens of a stream, in seconds."""
    return max((gap for answer in answers for gap in answer.gaps), default=0.0)


async def until_all_serve(server: BenchServer, session: aiohttp.ClientSession, replicas: int) -> float:
    """Wait until every replica serves again; return the time. Raises TimeoutError."""
    async with asyncio.timeout(RETURN_S):
        while True:
            values = await metrics(session, server.url)
            if values["text_generation_replicas_serving"] == replicas:
                return time.monotonic()
            await asyncio.sleep(0.05)
