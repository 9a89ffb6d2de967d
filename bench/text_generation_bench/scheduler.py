"""Measure the processor time of the scheduler, in microseconds: median and 99th percentile.

python -m text_generation_bench.scheduler [--profile]

* A decision (`apply` of a step, `dispatch`, `decide`) with 256 running and 1,000 queued requests, 10 tenants and shared
  prefixes. The budget is 100 µs.
* The same with 1 running request and an empty queue, with 8 replicas, with window groups of 128 and 1,024 tokens, with states, and each of
  these with a host cache.
* A prefix hit (peek, acquire, release) of 1,000 and of 8,000 tokens in a tree of 200,000 tokens.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import pstats
import random
import time
from array import array
from collections.abc import Callable

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.copies import CopyEnd
from text_generation_proto.values import FinishReason
from text_generation_router.memory import configure_collector
from text_generation_router.request import QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.messages import ReplicaSpec, SchedulerOutput, StepOutput
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.prefix_tree import PrefixTree
from text_generation_router.scheduling.scheduler import Scheduler

BLOCK = 16
TENANTS = 10
SYSTEM_PROMPTS = [tuple(range(1000 * number, 1000 * number + 400)) for number in range(20)]


class SchedulerLoad:
    """A scheduler with full replicas and a queue of constant length."""

    def __init__(
        self,
        *,
        running: int,
        queued: int,
        replicas: int,
        target_itl_s: float | None = None,
        windows: tuple[int, ...] = (),
        states: int = 0,
        host: bool = False,
    ) -> None:
        policy = Policy(4096, running, target_itl_s=target_itl_s)
        self._scheduler = Scheduler(policy, replicas)
        self._draw = random.Random(1)
        self._queued = queued
        self._requests = 0
        self._now = 0.0
        self._new_tokens: list[dict[int, int]] = [{} for _ in range(replicas)]
        """New tokens left, by slot, for each replica."""
        self._prefill: list[dict[int, int]] = [{} for _ in range(replicas)]
        """Prompt tokens not yet scheduled, by slot, for each replica."""
        self._orders: list[SchedulerOutput | None] = [None] * replicas
        self._number = [0] * replicas
        for replica in range(replicas):
            groups = tuple(CacheGroup(running * 100, window, host_blocks=running * 400) for window in windows)
            if states:
                groups += (CacheGroup(states, is_state=True, host_blocks=states * 4),)
            spec = ReplicaSpec(running + 64, running * 100, BLOCK, further_groups=groups)
            if host:
                spec = dataclasses.replace(spec, host_cache="host", host_blocks=running * 400)
            self._scheduler.open(replica, spec)
        for _ in range(replicas * running + queued):
            self._submit()

    def _submit(self) -> None:
        prompt = self._draw.choice(SYSTEM_PROMPTS) + tuple(self._draw.choices(range(30_000), k=100))
        self._requests += 1
        qos = QualityOfService(TenantId(str(self._draw.randrange(TENANTS))), end_by=self._now + 1000)
        new = self._draw.randrange(50, 400)
        self._scheduler.submit(Request(RequestId(self._requests), prompt, new, qos=qos), self._now)

    def run_step(self, applies: list[float], decisions: list[float]) -> None:
        """Run a step on each replica; append the seconds of `apply`, and of `dispatch` and `decide`."""
        scheduler = self._scheduler
        while len(scheduler.queue) < self._queued:
            self._submit()
        for replica in range(len(self._new_tokens)):
            outcome = self._step(replica)
            self._now += 0.02
            started = time.thread_time()
            scheduler.update(replica, outcome, self._now)
            applied = time.thread_time()
            scheduler.expire(self._now)
            scheduler.dispatch()
            orders = scheduler.schedule(replica)
            ended = time.thread_time()
            applies.append(applied - started)
            decisions.append(ended - applied)
            self._orders[replica] = orders

    def _step(self, replica: int) -> StepOutput:
        new_tokens, prefill, orders = self._new_tokens[replica], self._prefill[replica], self._orders[replica]
        chunks: tuple[tuple[int, int], ...] = ()
        if orders is not None:
            self._number[replica], chunks = orders.number, orders.prefill
            for slot in orders.release:
                new_tokens.pop(slot, None)
                prefill.pop(slot, None)
            for admission in orders.placements:
                length = len(admission.request.prompt) + len(admission.generated)
                new_tokens[admission.slot] = admission.request.max_new_tokens - len(admission.generated)
                prefill[admission.slot] = length - admission.cached_tokens
            for slot, tokens in chunks:
                prefill[slot] -= tokens
        slots = [slot for slot, rest in prefill.items() if rest == 0]
        finished = {}
        for slot in slots:
            new_tokens[slot] -= 1
            if new_tokens[slot] == 0:
                finished[slot] = FinishReason.LENGTH
                del new_tokens[slot], prefill[slot]
        output = StepOutput(self._number[replica], slots, (), [7] * len(slots), finished, prefilled=chunks, step_s=0.02)
        output.copied = [CopyEnd(copy.number) for copy in orders.copies] if orders is not None else ()
        return output


def report(name: str, seconds: list[float]) -> None:
    seconds = sorted(seconds)
    median, late = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
    print(f"{name:58} {median * 1e6:8.1f} {late * 1e6:8.1f}")


def decisions(name: str, load: SchedulerLoad, steps: int) -> None:
    for _ in range(steps // 2):
        load.run_step([], [])
    applies: list[float] = []
    decided: list[float] = []
    for _ in range(steps):
        load.run_step(applies, decided)
    report(name, [sum(pair) for pair in zip(applies, decided, strict=True)])
    report("    apply", applies)
    report("    dispatch and decide", decided)


def hits(asked: int) -> None:
    tokens = asked // BLOCK * BLOCK
    tree, draw = PrefixTree(BLOCK), random.Random(asked)
    prompts: list[list[int]] = []
    blocks = 0
    while blocks * BLOCK < 200_000:
        # Half of the prompts share the first half of an earlier one.
        start = draw.choice(prompts)[: tokens // 2 // BLOCK * BLOCK] if prompts and draw.random() < 0.5 else []
        prompt = start + draw.choices(range(50_000), k=tokens - len(start))
        prompts.append(prompt)
        key = array("I", prompt).tobytes()
        node, have = tree.lock(tree.find("", key))
        count = tokens // BLOCK - len(have)
        node, _ = tree.extend(node, key[len(have) * BLOCK * 4 :], range(blocks, blocks + count))
        tree.release(node)
        blocks += count
    keys = [array("I", prompt).tobytes() for prompt in prompts]
    seconds = []
    for _ in range(5000):
        key = draw.choice(keys)
        started = time.thread_time()
        tree.peek("", key)
        node, _ = tree.lock(tree.find("", key))
        tree.release(node)
        seconds.append(time.thread_time() - started)
    report(f"prefix hit of {asked} tokens in a tree of {tree.cached_blocks * BLOCK}", seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="profile the decisions with 256 running requests")
    profiled = parser.parse_args().profile
    print(f"{'microseconds':58} {'median':>8} {'p99':>8}")
    configure_collector()
    work: list[Callable[[], None]] = [
        lambda: decisions("decision, 1 running", SchedulerLoad(running=1, queued=0, replicas=1), 3000),
        lambda: decisions(
            "decision, 256 running, 1,000 queued", SchedulerLoad(running=256, queued=1000, replicas=1), 2000
        ),
        lambda: decisions(
            "the same under a latency target",
            SchedulerLoad(running=256, queued=1000, replicas=1, target_itl_s=0.03),
            2000,
        ),
        lambda: decisions(
            "the same with three groups of KV blocks",
            SchedulerLoad(running=256, queued=1000, replicas=1, windows=(128, 1024)),
            2000,
        ),
        lambda: decisions(
            "the same with states", SchedulerLoad(running=256, queued=1000, replicas=1, states=1024), 2000
        ),
        lambda: decisions(
            "the same with a host cache", SchedulerLoad(running=256, queued=1000, replicas=1, host=True), 2000
        ),
        lambda: decisions(
            "the same with three groups and a host cache",
            SchedulerLoad(running=256, queued=1000, replicas=1, windows=(128, 1024), host=True),
            2000,
        ),
        lambda: decisions(
            "the same with states and a host cache",
            SchedulerLoad(running=256, queued=1000, replicas=1, states=1024, host=True),
            2000,
        ),
        lambda: decisions("the same with 8 replicas", SchedulerLoad(running=256, queued=1000, replicas=8), 300),
        lambda: hits(1_000),
        lambda: hits(8_000),
    ]
    if not profiled:
        for measure in work:
            measure()
        return
    profile = cProfile.Profile()
    profile.runcall(work[1])
    pstats.Stats(profile).sort_stats("cumtime").print_stats("scheduling", 30)


if __name__ == "__main__":
    main()
