"""Soak test over HTTP: hours of mixed traffic in minutes, to find leaks, mixed-up sequences and failures.

python -m text_generation_bench.soak_gpu --model FOLDER --minutes 5

Many concurrent clients send greedy and seeded requests of random lengths to a server whose KV cache is too small for them, so
that sequences are preempted, and cancel 30 % of them midway. Meanwhile the memory of the GPU and of the shards is sampled. Then
some of the finished requests are sent again one at a time, and the answers are compared:

    up to the first difference of two answers, each token has the same log-probability in both, within --tolerance;
    where greedy answers differ, the two tokens were nearly equally probable, within --tolerance

Rounding depends on the batch, so answers may differ. In bfloat16 a small model has single positions, about one in a thousand on
such prompts, at which rounding changes a log-probability by one or two: --outliers of them are accepted. A wrong key, token or
position would change every token after it. The exit code is 1 if a limit was exceeded, a request failed, nothing was preempted,
or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from text_generation_bench.gpu_server import Server, last_lines, launched
from text_generation_shard.gpu_watch import WatchedGpu
from text_generation_shard.gpus import GpusUnreadable, nvml, read_gpus, visible_gpus

WORDS = "time year people way day man thing woman life child world school state family student"
CANCELLED = 0.3
SAMPLED_EVERY_S = 1.0
KEPT = 2000
EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.1},
    {"top_n_tokens": 3},
    {"grammar": {"type": "regex", "value": "([a-z]{1,9} ){1,40}"}},
)
EXTRA_WEIGHTS = (7, 1, 1, 1)
GROWTH = 1.02
SPARE_BYTES = 64 << 20


AUDITS_S = 300.0
"""Seconds that the audits of the traffic may take after its end."""


@dataclass
class Answer:
    """A finished request and its answer: token ids and their log-probabilities."""

    body: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)

    @property
    def is_greedy(self) -> bool:
        return "seed" not in self.body["parameters"]


@dataclass
class Soak:
    """Results of the traffic."""

    counts: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    gpu_bytes: list[float] = field(default_factory=list)
    shard_bytes: list[float] = field(default_factory=list)

    @property
    def so_far(self) -> str:
        """The counts as text."""
        return ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))

    def keep(self, answer: Answer, draw: random.Random) -> None:
        """Add to `answers`, a uniform sample of all finished answers (Vitter's algorithm R, 1985)."""
        if len(self.answers) < KEPT:
            self.answers.append(answer)
        elif (index := draw.randrange(self.counts["finished"])) < KEPT:
            self.answers[index] = answer


def main() -> int:
    """Run the soak test, replay some answers, and report."""
    options = _options()
    arguments = ["--max-batch-total-tokens", str(options.kv_tokens), "--max-total-tokens", str(options.longest)]
    # The queue may hold what all clients ask for: this is no test of its limits.
    arguments += ["--max-concurrent-requests", str(2 * options.clients)]
    arguments += ["--max-queued-tokens", str(2 * options.clients * options.longest)]
    arguments += ["--audit-share", "1", "--audit-busy", "1"]
    arguments += [*shlex.split(options.launcher_args)]
    with tempfile.TemporaryDirectory(prefix="soak-gpu-") as scratch:
        log = Path(scratch, "log")
        with launched(options.model, arguments, log) as server:
            soak = asyncio.run(run(options, server))
            preemptions = read_metric(server.url, "text_generation_preemptions_total")
            passed = report(soak, preemptions)
            passed &= report_audits(server.url)
            passed &= asyncio.run(replay(options, server.url, soak.answers))
        if soak.errors:
            print(f"first error: {soak.errors[0]}\nend of the server's log:\n{last_lines(log)}")
    return 0 if passed else 1


async def run(options: argparse.Namespace, server: Server) -> Soak:
    """Run the traffic until the time is up and the last request has finished."""
    soak, until = Soak(), time.monotonic() + 60 * options.minutes
    sampler = asyncio.get_running_loop().run_in_executor(None, _sample_memory, server, soak, until)
    async with _session() as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(_print_each_minute(soak, until))
        for number in range(options.clients):
            tasks.create_task(
                _client(session, server.url, random.Random(options.seed + number), soak, until, options.most_new)
            )
    await sampler
    return soak


async def _print_each_minute(soak: Soak, until: float) -> None:
    while (left := until - time.monotonic()) > 0:
        await asyncio.sleep(min(60, left))
        print(f"{max(0.0, left / 60 - 1):5.1f} minutes left: {soak.so_far}", flush=True)


async def _client(
    session: aiohttp.ClientSession, url: str, draw: random.Random, soak: Soak, until: float, most_new: int
) -> None:
    while time.monotonic() < until:
        answer = Answer(draw_request(draw, most_new))
        leaves_after = draw.randrange(1, 60) if draw.random() < CANCELLED else None
        try:
            await ask(session, url, answer, leaves_after)
        except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
            soak.counts["failed"] += 1
            soak.errors.append(f"{type(error).__name__}: {error}")
            continue
        is_cut = leaves_after is not None and len(answer.ids) == leaves_after
        soak.counts["cancelled" if is_cut else "finished"] += 1
        soak.counts["tokens"] += len(answer.ids)
        if not is_cut:
            soak.keep(answer, draw)


def draw_request(draw: random.Random, most_new: int) -> dict[str, Any]:
    """Return a random request: half are greedy, half seeded, some with a grammar, a penalty or top tokens. Prompts share
    prefixes, so that cached blocks are reused."""
    opening, vocabulary = random.Random(draw.randrange(20)), WORDS.split()
    words = [opening.choice(vocabulary) for _ in range(opening.randrange(1, 200))]
    words += [draw.choice(vocabulary) for _ in range(draw.randrange(1, 100))]
    parameters: dict[str, Any] = {"max_new_tokens": draw.randrange(1, most_new)}
    if draw.random() < 0.5:
        parameters |= {"do_sample": True, "seed": draw.randrange(1 << 31), "temperature": 0.8, "top_p": 0.95}
    parameters |= draw.choices(EXTRAS, weights=EXTRA_WEIGHTS)[0]
    return {"inputs": " ".join(words), "parameters": parameters}


async def ask(session: aiohttp.ClientSession, url: str, answer: Answer, leaves_after: int | None = None) -> None:
    """Stream an answer; disconnect after `leaves_after` tokens."""
    async with session.post(f"{url}/generate_stream", json=answer.body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise RuntimeError(event["error"])
            answer.ids.append(event["token"]["id"])
            answer.logprobs.append(event["token"]["logprob"])
            answer.tops.append({top["id"]: top["logprob"] for top in event.get("top_tokens") or ()})
            if len(answer.ids) == leaves_after:
                return


async def replay(options: argparse.Namespace, url: str, answers: Sequence[Answer]) -> bool:
    """Repeat some requests one at a time; return True if all answers are as expected."""
    selected = random.Random(options.seed).sample(answers, min(options.replays, len(answers)))
    drifts, gaps, same = [0.0], [0.0], Counter[bool]()
    async with _session() as session:
        for answer in selected:
            # Top tokens give the probability of the other answer's token.
            parameters = answer.body["parameters"] | {"top_n_tokens": 5}
            again = Answer(answer.body | {"parameters": parameters})
            await ask(session, url, again)
            common = next((i for i, (a, b) in enumerate(zip(answer.ids, again.ids, strict=False)) if a != b), None)
            same[answer.is_greedy] += answer.ids == again.ids
            shared = slice(0, common)
            drifts += [abs(a - b) for a, b in zip(answer.logprobs[shared], again.logprobs[shared], strict=False)]
            if common is None:
                gaps += [float("inf")] * (len(answer.ids) != len(again.ids))
            elif answer.is_greedy:
                gaps.append(again.logprobs[common] - again.tops[common].get(answer.ids[common], float("-inf")))
    greedy = sum(answer.is_greedy for answer in selected)
    print(
        f"replayed alone: {same[True]} of {greedy} greedy and {same[False]} of {len(selected) - greedy} seeded are identical"
    )
    good = _within("log-probability of the same token", drifts, options)
    return good & _within("gap where greedy answers differ", gaps, options)


def _within(name: str, differences: Sequence[float], options: argparse.Namespace) -> bool:
    """Return True if at most the share of outliers, or one, is beyond the tolerance."""
    beyond = sum(difference > options.tolerance for difference in differences)
    text = f"{max(differences):.3f} at most, {beyond} of {len(differences)} beyond {options.tolerance}"
    return line(name, text, good=beyond <= max(1, options.outliers * len(differences)))


def report(soak: Soak, preemptions: float) -> bool:
    """Print a line for each condition; return True if all hold."""
    print(soak.so_far)
    good = line("requests that failed", str(soak.counts["failed"]), good=not soak.counts["failed"])
    good &= line("preemptions", f"{preemptions:.0f}", good=preemptions > 0)
    for name, sizes in (("memory of the GPU", soak.gpu_bytes), ("memory of the shards", soak.shard_bytes)):
        if len(sizes) < 8:
            print(f"-    {name:<36} too few samples")
            continue
        quarter = len(sizes) // 4
        early, late = statistics.median(sizes[quarter : 2 * quarter]), statistics.median(sizes[-quarter:])
        text = f"{early / 2**20:.0f} MiB in the second quarter, {late / 2**20:.0f} MiB in the last"
        good &= line(name, text, good=late <= GROWTH * early + SPARE_BYTES)
    return good


def report_audits(url: str) -> bool:
    """Wait for the audits of what was served, and print a line; return True if they confirm it."""
    until = time.monotonic() + AUDITS_S
    while (waiting := read_metric(url, "text_generation_audits_waiting")) and time.monotonic() < until:
        time.sleep(0.5)
    audits, wrong = (read_metric(url, f"text_generation_{name}_total") for name in ("audits", "audit_mismatch"))
    text = f"{wrong:.0f} of {audits:.0f}, {waiting:.0f} were not audited in time"
    return line("texts that audits did not confirm", text, good=not wrong and audits > 0)


def line(name: str, text: str, *, good: bool) -> bool:
    """Print a result line and return `good`."""
    print(f"{'ok  ' if good else 'FAIL'} {name:<36} {text}", flush=True)
    return good


def _sample_memory(server: Server, soak: Soak, until: float) -> None:
    launcher = psutil.Process(server.launcher.pid)
    shards = [
        child for child in launcher.children(recursive=True) if "text_generation_shard" in " ".join(child.cmdline())
    ]
    gpus = _visible_gpus()
    while time.monotonic() < until:
        soak.shard_bytes.append(sum(shard.memory_info().rss for shard in shards if shard.is_running()))
        if gpus:
            soak.gpu_bytes.append(sum(gpu.state().memory_used_bytes for gpu in gpus))
        time.sleep(SAMPLED_EVERY_S)


def _visible_gpus() -> list[WatchedGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names; none if they cannot be read."""
    try:
        gpus = visible_gpus(read_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        return [WatchedGpu(nvml(), gpu) for gpu in gpus]
    except GpusUnreadable:
        return []


def read_metric(url: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the model")
    add("--minutes", type=float, default=5.0)
    add("--clients", type=int, default=96, help="requests open at once")
    add("--kv-tokens", type=int, default=6144, help="tokens of the KV cache")
    add("--longest", type=int, default=2048, help="maximum of prompt and new tokens of a request")
    add(
        "--most-new",
        type=int,
        default=1000,
        help="maximum new tokens of an answer; longer answers are preempted more often",
    )
    add("--replays", type=int, default=200, help="answers to repeat and compare")
    add("--tolerance", type=float, default=0.25, help="limit of differences of log-probabilities")
    add("--outliers", type=float, default=0.005, help="accepted share of differences beyond the tolerance")
    add("--seed", type=int, default=0)
    add("--launcher-args", default="", help="more arguments for the launcher, in one string")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
