"""Continuous batching: a new request joins the next step, alone or with others, while running streams get new blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from checked_echo import CheckedEcho
from http_stack import serve

from text_generation_router.errors import ServingError
from text_generation_router.generation import Sink, TokenOutput, run_generation
from text_generation_router.request import LogprobJson, Request, RequestId

STEP_S = 0.3
"""Duration of the steps in which requests arrive. Half of it is for their way to the engine."""
ROUNDS = 4
"""A busy machine may hold up each of them but one."""
MAX_STEPS = 2
"""Steps that end before a new request's first token: the one in progress when it came, and its own."""


class Listener(Sink):
    """Calls back for each token."""

    def __init__(self, on_token: Callable[[], None]) -> None:
        self._on_token = on_token

    def on_output(self, output: TokenOutput) -> None:
        self._on_token()

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson]) -> None:
        raise AssertionError("they were not requested")

    def on_failure(self, error: ServingError) -> None:
        raise error


async def test_new_requests_join_the_next_step(demo_model: Path) -> None:
    async with serve(demo_model, chats=False) as stack:
        engine = stack.engine
        assert isinstance(engine, CheckedEcho)
        steps = 0
        stepped = asyncio.Event()

        def on_step() -> None:
            nonlocal steps
            steps += 1
            stepped.set()

        async def wait_for_steps(count: int) -> None:
            for _ in range(count):
                stepped.clear()
                await stepped.wait()

        with ExitStack() as running:
            # It has the first slot: it gets the token of a step before the new requests get theirs.
            first = Request(RequestId(0), tuple(range(50, 70)), max_new_tokens=2000)
            engine.step_s = 0.005
            running.enter_context(run_generation(stack.cluster, first, stack.tokenizer, Listener(on_step)))
            in_time: set[int] = set()
            for round_, count in enumerate((1, 8) * ROUNDS):
                if count in in_time:
                    continue
                engine.step_s = 0.005
                await wait_for_steps(12)  # so that it needs a new block in most rounds
                engine.step_s = STEP_S
                await wait_for_steps(3)  # orders are held for a share of the last two steps
                waited: list[int] = []
                done = asyncio.Event()

                def on_first_token(
                    came: int, waited: list[int] = waited, done: asyncio.Event = done, count: int = count
                ) -> None:
                    waited.append(steps - came)
                    if len(waited) == count:
                        done.set()

                # They come one after another at the start of a step.
                for number in range(count):
                    request = Request(RequestId(1000 * (round_ + 1) + number), (60, 61), max_new_tokens=1)
                    listener = Listener(lambda came=steps, on_first_token=on_first_token: on_first_token(came))
                    running.enter_context(run_generation(stack.cluster, request, stack.tokenizer, listener))
                    await asyncio.sleep(0.001)
                async with asyncio.timeout(20):
                    await done.wait()
                if max(waited) <= MAX_STEPS:
                    in_time.add(count)
            assert in_time == {1, 8}
