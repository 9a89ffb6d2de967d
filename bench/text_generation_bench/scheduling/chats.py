"""Chats with shared system prompts: the effect of the prefix cache, and of dispatch by prefix over two replicas.

Histories are exact to the token: token ids of answers are looked up from their texts in `logprobs`. The ideal hit rate is
computed independently of the router's prefix tree.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import tokenizers

from text_generation_bench.load.measures import quantile
from text_generation_bench.scheduling.client import Completion, client, complete, metrics, verdict
from text_generation_bench.scheduling.server import CpuUsage, serving
from text_generation_bench.simulator.measures import IdealPrefixCache

TTFT_BAR = 5.0
HIT_BAR = 0.98
MAX_PREFIXES = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system-tokens", type=int, default=1000)
    parser.add_argument("--user-tokens", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--system-prompts", type=int, help="default: 1, and 4 for replicas")
    parser.add_argument("--think-s", type=float, default=0.0, help="mean pause of a user before a turn, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flag", action="append", default=[], help="additional flag for the launcher")


class Vocabulary:
    """Token ids for prompts, and the inverse of the tokenizer's vocabulary."""

    def __init__(self, model: Path) -> None:
        tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self._ids: dict[str, int] = {}
        self.words: list[int] = []
        for token_id in range(tokenizer.get_vocab_size()):
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            if self._ids.setdefault(text, token_id) == token_id and text.startswith(" ") and text[1:].isalpha():
                self.words.append(token_id)
        self.ambiguous = 0
        """Number of tokens looked up whose text is not unique: pieces of characters."""

    def token_ids(self, texts: Sequence[str]) -> list[int]:
        """Return the token ids of texts."""
        self.ambiguous += sum("\ufffd" in text for text in texts)
        return [self._ids[text] for text in texts]


@dataclass
class ChatRun:
    """The results of one run."""

    name: str
    answers: list[Completion] = field(default_factory=list)
    seconds: float = 0.0
    metric_rate: float = 0.0
    ideal_tokens: IdealPrefixCache = field(default_factory=lambda: IdealPrefixCache(1, MAX_PREFIXES))
    ideal_blocks: IdealPrefixCache = field(default_factory=lambda: IdealPrefixCache(16, MAX_PREFIXES))
    usage: str = ""

    @property
    def hit_rate(self) -> float:
        """Fraction of prompt tokens that were cached, from the `usage` of the answers."""
        return sum(answer.cached for answer in self.answers) / sum(answer.prompt_tokens for answer in self.answers)

    def ttft(self, share: float) -> float:
        """Return a quantile of the time to first token, in seconds."""
        return quantile([answer.first for answer in self.answers], share)

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return sum(answer.generated for answer in self.answers) / self.seconds

    def row(self) -> None:
        print(
            f"{self.name:<14}{self.ttft(0.5) * 1e3:9.0f}{self.ttft(0.99) * 1e3:9.0f}{self.hit_rate:10.4f}"
            f"{self.metric_rate:9.4f}{self.ideal_tokens.hit_rate:9.4f}{self.ideal_blocks.hit_rate:9.4f}"
            f"{self.rate:9.1f}{self.seconds:8.1f}   {self.usage}",
            flush=True,
        )


HEADER = (
    f"{'':<14}{'TTFT p50':>9}{'p99 ms':>9}{'hit rate':>10}{'metric':>9}{'ideal':>9}{'blocks':>9}{'tok/s':>9}{'s':>8}"
)


async def run_chats(arguments: argparse.Namespace, name: str, systems: int, *flags: str) -> ChatRun:
    """Start a server with `flags` and let all users chat."""
    vocabulary = Vocabulary(arguments.model)
    result = ChatRun(name)
    draw = random.Random(arguments.seed)
    prompts = [draw.choices(vocabulary.words, k=arguments.system_tokens) for _ in range(systems)]
    flags = (f"--engine={arguments.engine}", "--dtype=float32", *flags, *arguments.flag)
    async with serving(arguments.model, *flags) as server, client() as session:
        for number in range(4):  # warm-up
            await complete(session, server.url, draw.choices(vocabulary.words, k=50 + number), 4)
        before = await metrics(session, server.url)
        usage, started = CpuUsage(server), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for user in range(arguments.users):
                chat = Chat(arguments, vocabulary, user, result)
                tasks.create_task(chat.run(session, server.url, prompts[user % systems]))
        result.seconds = time.monotonic() - started
        result.usage = usage.line()
        after = await metrics(session, server.url)
    asked, hits = (
        after[name] - before[name]
        for name in (
            "text_generation_prefix_cache_queries_tokens_total",
            "text_generation_prefix_cache_hits_tokens_total",
        )
    )
    result.metric_rate = hits / asked
    if vocabulary.ambiguous:
        print(f"{vocabulary.ambiguous} token ids are ambiguous")
    result.row()
    return result


class Chat:
    """The chat of one user."""

    def __init__(self, arguments: argparse.Namespace, vocabulary: Vocabulary, user: int, result: ChatRun) -> None:
        self._arguments = arguments
        self._vocabulary = vocabulary
        self._result = result
        self._draw = random.Random(f"{arguments.seed} {user}")

    async def run(self, session: aiohttp.ClientSession, url: str, system: Sequence[int]) -> None:
        """Send all turns, each after the answer to the last one."""
        arguments, draw, result = self._arguments, self._draw, self._result
        history = list(system)
        for _ in range(arguments.turns):
            if arguments.think_s:
                await asyncio.sleep(draw.expovariate(1 / arguments.think_s))
            tokens = max(1, round(arguments.user_tokens * draw.uniform(0.75, 1.25)))
            history += draw.choices(self._vocabulary.words, k=tokens)
            for ideal in (result.ideal_tokens, result.ideal_blocks):
                ideal.add_prompt(tuple(history))
            answer = await complete(session, url, history, arguments.new_tokens)
            if answer.error:
                raise RuntimeError(answer.error)
            answered = self._vocabulary.token_ids(answer.tokens)
            for ideal in (result.ideal_tokens, result.ideal_blocks):
                ideal.add_answer(tuple(history), tuple(answered))
            history += answered
            result.answers.append(answer)


async def chats(arguments: argparse.Namespace) -> None:
    """Compare runs with and without prefix cache."""
    systems = arguments.system_prompts or 1
    print(HEADER)
    on = await run_chats(arguments, "reuse", systems, "--prefix-caching")
    off = await run_chats(arguments, "no reuse", systems, "--no-prefix-caching")
    factor = off.ttft(0.5) / on.ttft(0.5)
    share = on.hit_rate / (on.ideal_tokens.hit_rate or 1.0)
    print(f"TTFT p50 {factor:.1f} times better (bar {TTFT_BAR:g}): {verdict(holds=factor >= TTFT_BAR)}")
    print(f"hit rate {share:.4f} of the ideal (bar {HIT_BAR:g}): {verdict(holds=share >= HIT_BAR)}")


async def replicas(arguments: argparse.Namespace) -> None:
    """Compare dispatch policies with two replicas."""
    systems = arguments.system_prompts or 4
    print(HEADER)
    results = {
        dispatch: await run_chats(
            arguments, dispatch, systems, "--num-replicas=2", "--num-threads=1", f"--dispatch={dispatch}"
        )
        for dispatch in ("prefix", "round-robin", "least-loaded")
    }
    prefix, turns = results["prefix"], results["round-robin"]
    for what, ours, theirs in (
        ("hit rate", prefix.hit_rate, turns.hit_rate),
        ("throughput", prefix.rate, turns.rate),
    ):
        holds = ours > theirs
        print(f"{what}: prefix {ours:.4g}, round robin {theirs:.4g}, ratio {ours / theirs:.3f}: {verdict(holds=holds)}")
