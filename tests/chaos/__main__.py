"""Runs a seeded sample of the matrix and prints a table: python tests/chaos --minutes 10 --seed 1.

normal    requests/s before the fault          exit   exit code of the launcher, if it ended
after     requests/s after it                  ends   the streams, by their end
back      seconds until `after` was reached
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import aiohttp
from acts import Result, Runner
from faults import HANGING_PROMPT, LEFT_OUT, Case, matrix
from tokenizers import Tokenizer
from traffic import LONGEST_S

MODEL = Path(__file__).parents[2] / ".cache" / "models" / "SmolLM2-135M-Instruct"


LARGEST_SHARE = 0.1
"""Share of the time that one fault may take; longer ones are for longer runs."""


def sample(cases: list[Case], seed: int) -> list[Case]:
    """Return the cases in a random order in which each fault has one case before any has two."""
    draw = random.Random(seed)
    by_fault: dict[str, list[Case]] = defaultdict(list)
    for case in draw.sample(cases, len(cases)):
        by_fault[case.fault.name].append(case)
    rounds = max(map(len, by_fault.values()))
    return [each[number] for number in range(rounds) for each in by_fault.values() if number < len(each)]


def row(result: Result) -> str:
    ends = ", ".join(f"{number} {end}" for end, number in sorted(result.ends.items()))
    code = "" if result.exit_code is None else str(result.exit_code)
    verdict = "ok" if not result.problems else "FAILED: " + "; ".join(result.problems)
    rates = f"{result.normal:7.1f} {result.recovered:7.1f} {result.recovery_s:6.1f}"
    return f"{result.case!s:32} {rates} {code:>5}  {verdict}  ({ends})"


async def run(options: argparse.Namespace) -> list[Result]:
    """Run cases until the time is over."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    hang_token = tokenizer.encode(HANGING_PROMPT).ids[3]
    cases = [case for case in sample(matrix(), options.seed) if options.only in str(case)]
    seconds = 60 * options.minutes
    end = time.monotonic() + seconds
    timeout, connector = aiohttp.ClientTimeout(total=LONGEST_S), aiohttp.TCPConnector(limit=0, force_close=True)
    results: list[Result] = []
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        runner = Runner(options.model, hang_token, session)
        try:
            for case in cases:
                if case.fault.seconds > LARGEST_SHARE * seconds or time.monotonic() + case.estimate > end:
                    continue
                results.append(await runner.run(case, str(options.seed)))
                print(row(results[-1]), flush=True)
                print("".join(f"    {line}\n" for line in results[-1].log), end="", flush=True)
        finally:
            await runner.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="part of FAULT/PROCESS/PHASE")
    parser.add_argument("--model", type=Path, default=MODEL)
    options = parser.parse_args()
    print(f"{'fault/process/phase':32} {'normal':>7} {'after':>7} {'back':>6} {'exit':>5}")
    results = asyncio.run(run(options))
    failed = [result for result in results if result.problems]
    print(f"{len(results)} of {len(matrix())} cases, {len(failed)} failed; seed {options.seed}")
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}: {reason}")
    for result in failed:
        print(f"""again: make chaos MINUTES={options.minutes:g} SEED={options.seed} ARGS="--only '{result.case}'" """)
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
