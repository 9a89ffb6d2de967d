"""Processor time per token of router and shard with TensorRT-LLM's stand-in: make bench-trtllm.

128 streams of 200 tokens, 20 ms per step; processor time of each process, from /proc, divided by the tokens. The shard's process
includes the stand-in's engine, which in production is another process. Its time is measured separately, with a reader that
discards the tokens, and subtracted. Measured without log-probabilities, and with them, as TGI's streams have them. Each is the
least of three rounds: other programs on the machine add to it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from text_generation_bench.router import STEP_MS, STREAMS, TOKENS_A_STREAM, in_child, row, stream_load
from text_generation_bench.router_processes import cpu_seconds, router_of, start

FAKES = Path(__file__).parents[2] / "tests" / "fakes" / "tensorrt_llm"
VERSIONS = ("1.2", "1.3")
PROMPT_TOKENS = 100
ROUNDS = 3


def main() -> None:
    """Print one table per release; with --alone, the time that the stand-in takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder with config.json and tokenizer.json")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(asyncio.run(alone(arguments.model)))
        return
    tokens = STREAMS * TOKENS_A_STREAM
    for version, logprobs in product(VERSIONS, ("never", "auto")):
        print(f"stand-in {version}, --token-logprobs {logprobs:<5}    measured   budget")
        with servers(arguments.model, version, logprobs) as (router, shard, port):
            in_child(stream_load, port, 20)
            spent = [float("inf")] * 2
            for _ in range(ROUNDS):
                before = [cpu_seconds(router), cpu_seconds(shard)]
                in_child(stream_load, port, TOKENS_A_STREAM)
                after = [cpu_seconds(router), cpu_seconds(shard)]
                spent = [min(s, b - a) for s, a, b in zip(spent, before, after, strict=True)]
        command = [sys.executable, "-m", "text_generation_bench.trtllm", "--alone", "--model", str(arguments.model)]
        env = environ(version, logprobs)
        engine = float(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)
        row("CPU of the router a streamed token", spent[0] / tokens * 1e6, 25, "us")
        row("CPU of the shard a streamed token", spent[1] / tokens * 1e6 - engine, 15, "us")
        row("(the stand-in alone, subtracted)", engine, float("inf"), "us")


def environ(version: str, logprobs: str) -> dict[str, str]:
    """Return the environment of a process that imports this stand-in, with the router's setting of --token-logprobs."""
    path = os.pathsep.join((str(FAKES), str(FAKES / "releases" / version)))
    return os.environ | {"PYTHONPATH": path, "TRTLLM_STANDIN_STEP_MS": str(STEP_MS), "TOKEN_LOGPROBS": logprobs}


@contextmanager
def servers(model: Path, version: str, logprobs: str) -> Iterator[tuple[int, int, int]]:
    """Run a shard and a router; yield the pid of the router, the pid of the shard, the port of the router."""
    with tempfile.TemporaryDirectory() as folder:
        address, env = f"unix://{folder}/shard", environ(version, logprobs)
        arguments = ("--engine=tensorrt-llm", f"--address={address}", f"--model-path={model}")
        shard = start("text-generation-shard", *arguments, env=env)
        with router_of(shard, address, model, env) as (router, port):
            yield router, shard.pid, port


async def alone(model: Path) -> float:
    """Return the processor time per token of the stand-in, in µs, with a reader that discards tokens."""
    from tensorrt_llm import LLM, SamplingParams

    llm = LLM(str(model), skip_tokenizer_init=True, max_batch_size=STREAMS)

    logprobs = None if os.environ["TOKEN_LOGPROBS"] == "never" else 1

    async def run(number: int, tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, end_id=-1, ignore_eos=True, logprobs=logprobs, detokenize=False)
        prompt = list(range(number, number + PROMPT_TOKENS))
        async for _ in llm.generate_async({"prompt_token_ids": prompt}, sampling, streaming=True):
            pass

    async def run_all(tokens: int) -> float:
        before = resource.getrusage(resource.RUSAGE_SELF)
        async with asyncio.TaskGroup() as tasks:
            for number in range(STREAMS):
                tasks.create_task(run(number, tokens))
        after = resource.getrusage(resource.RUSAGE_SELF)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    await run_all(20)
    spent = min([await run_all(TOKENS_A_STREAM) for _ in range(ROUNDS)])
    llm.shutdown()
    return spent / (STREAMS * TOKENS_A_STREAM) * 1e6


if __name__ == "__main__":
    main()
