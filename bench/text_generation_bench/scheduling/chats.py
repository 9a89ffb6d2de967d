"""Chats that share system prompts: what prefix reuse brings, and prefix-aware dispatch over two replicas.

Histories are exact to the token: the answer's tokens are read from their texts in `logprobs`, through the tokenizer's
vocabulary turned round. The ideal is worked out by remembering every prefix of tokens that was ever asked for or
answered, so that it shares nothing with the tree whose figures it is held against.
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

from text_generation_bench.scheduling.client import Answer, client, complete, metrics, quantile, verdict
from text_generation_bench.scheduling.server import Busy, serving

TTFT_BAR = 5.0
HIT_BAR = 0.98


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system-tokens", type=int, default=1000)
    parser.add_argument("--user-tokens", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--system-prompts", type=int, help="default: 1, and 4 for replicas")
    parser.add_argument("--think-s", type=float, default=0.0, help="mean pause of a user before a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flag", action="append", default=[], help="a further flag for the launcher")


class Vocabulary:
    """Tokens to draw prompts from, and to read answers back with."""

    def __init__(self, model: Path) -> None:
        tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self._ids: dict[str, int] = {}
        self.words: list[int] = []
        for token_id in range(tokenizer.get_vocab_size()):
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            if self._ids.setdefault(text, token_id) == token_id and text.startswith(" ") and text[1:].isalpha():
                self.words.append(token_id)
        self.ambiguous = 0
        """Tokens read back that several have the text of: pieces of characters."""

    def read(self, texts: Sequence[str]) -> list[int]:
        """The ids of an answer's tokens."""
        self.ambiguous += sum("\ufffd" in text for text in texts)
        return [self._ids[text] for text in texts]


class Ideal:
    """A cache that forgets nothing, with every prompt there as soon as it was asked, in tokens or whole blocks."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.tokens = 0
        self.in_blocks = 0
        self.asked = 0

    def ask(self, prompt: Sequence[int]) -> None:
        """A request came. One token of a prompt is always left to compute."""
        known = 0
        for prefix in _prefixes(prompt)[: len(prompt) - 1]:
            if prefix not in self._seen:
                break
            known += 1
        self.asked += len(prompt)
        self.tokens += known
        self.in_blocks += known // 16 * 16
        self._seen.update(_prefixes(prompt))

    def answer(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """An answer is whole. Its last token was never computed."""
        self._seen.update(_prefixes((*prompt, *answer[:-1])))


def _prefixes(tokens: Sequence[int]) -> list[int]:
    prefix, prefixes = 0, []
    for token in tokens:
        prefix = hash((prefix, token))
        prefixes.append(prefix)
    return prefixes


@dataclass
class Result:
    """One run."""

    name: str
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    metric_rate: float = 0.0
    ideal: Ideal = field(default_factory=Ideal)
    busy: str = ""

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached, as usage says."""
        return sum(one.cached for one in self.answers) / sum(one.prompt_tokens for one in self.answers)

    def ttft(self, share: float) -> float:
        """Quantile of the seconds to the first token."""
        return quantile([one.first for one in self.answers], share)

    @property
    def rate(self) -> float:
        """New tokens a second."""
        return sum(one.generated for one in self.answers) / self.seconds

    def row(self) -> None:
        ideal, asked = self.ideal, self.ideal.asked
        print(
            f"{self.name:<14}{self.ttft(0.5) * 1e3:9.0f}{self.ttft(0.99) * 1e3:9.0f}{self.hit_rate:10.4f}"
            f"{self.metric_rate:9.4f}{ideal.tokens / asked:9.4f}{ideal.in_blocks / asked:9.4f}"
            f"{self.rate:9.1f}{self.seconds:8.1f}   {self.busy}",
            flush=True,
        )


HEADER = (
    f"{'':<14}{'TTFT p50':>9}{'p99 ms':>9}{'hit rate':>10}{'metric':>9}{'ideal':>9}{'blocks':>9}{'tok/s':>9}{'s':>8}"
)


async def play(arguments: argparse.Namespace, name: str, systems: int, *flags: str) -> Result:
    """Start a server with `flags`, let all users chat."""
    vocabulary = Vocabulary(arguments.model)
    result = Result(name)
    draw = random.Random(arguments.seed)
    prompts = [draw.choices(vocabulary.words, k=arguments.system_tokens) for _ in range(systems)]
    flags = (f"--engine={arguments.engine}", "--dtype=float32", *flags, *arguments.flag)
    async with serving(arguments.model, *flags) as server, client() as session:
        for number in range(4):  # what is slow only once
            await complete(session, server.url, draw.choices(vocabulary.words, k=50 + number), 4)
        before = await metrics(session, server.url)
        busy, started = Busy(server), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for user in range(arguments.users):
                chat = Chat(arguments, vocabulary, user, result)
                tasks.create_task(chat.run(session, server.url, prompts[user % systems]))
        result.seconds = time.monotonic() - started
        result.busy = busy.line()
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
        print(f"{vocabulary.ambiguous} tokens could not be read back")
    result.row()
    return result


class Chat:
    """One user."""

    def __init__(self, arguments: argparse.Namespace, vocabulary: Vocabulary, user: int, result: Result) -> None:
        self._arguments = arguments
        self._vocabulary = vocabulary
        self._result = result
        self._draw = random.Random(f"{arguments.seed} {user}")

    async def run(self, session: aiohttp.ClientSession, url: str, system: Sequence[int]) -> None:
        """All turns, each once the one before is answered."""
        arguments, draw, result = self._arguments, self._draw, self._result
        history = list(system)
        for _ in range(arguments.turns):
            if arguments.think_s:
                await asyncio.sleep(draw.expovariate(1 / arguments.think_s))
            tokens = max(1, round(arguments.user_tokens * draw.uniform(0.75, 1.25)))
            history += draw.choices(self._vocabulary.words, k=tokens)
            result.ideal.ask(history)
            answer = await complete(session, url, history, arguments.new_tokens)
            if answer.error:
                raise RuntimeError(answer.error)
            answered = self._vocabulary.read(answer.tokens)
            result.ideal.answer(history, answered)
            history += answered
            result.answers.append(answer)


async def chats(arguments: argparse.Namespace) -> None:
    """Reuse on against off, one replica."""
    systems = arguments.system_prompts or 1
    print(HEADER)
    on = await play(arguments, "reuse", systems, "--prefix-caching")
    off = await play(arguments, "no reuse", systems, "--no-prefix-caching")
    factor = off.ttft(0.5) / on.ttft(0.5)
    share = on.hit_rate / (on.ideal.tokens / on.ideal.asked)
    print(f"TTFT p50 {factor:.1f} times better (bar {TTFT_BAR:g}): {verdict(holds=factor >= TTFT_BAR)}")
    print(f"hit rate {share:.4f} of the ideal (bar {HIT_BAR:g}): {verdict(holds=share >= HIT_BAR)}")


async def replicas(arguments: argparse.Namespace) -> None:
    """Two replicas: dispatch by prefix, against others."""
    systems = arguments.system_prompts or 4
    print(HEADER)
    results = {
        how: await play(arguments, how, systems, "--num-replicas=2", "--num-threads=1", f"--dispatch={how}")
        for how in ("prefix", "round-robin", "least-loaded")
    }
    prefix, turns = results["prefix"], results["round-robin"]
    for what, ours, theirs in (
        ("hit rate", prefix.hit_rate, turns.hit_rate),
        ("throughput", prefix.rate, turns.rate),
    ):
        holds = ours > theirs
        print(f"{what}: prefix {ours:.4g}, round robin {theirs:.4g}, ratio {ours / theirs:.3f}: {verdict(holds=holds)}")
