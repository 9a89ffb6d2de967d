"""Continuous batching: a newcomer joins the next step, alone or in a crowd, whatever the running streams need meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from http_stack import serve

from text_generation_router.errors import ServingError
from text_generation_router.generation import TokenOutput, run_generation
from text_generation_router.request import LogprobJson, Request, RequestId

STEP_MS = 80.0
ALLOWED_STEPS = 2
"""Steps that end up to a newcomer's first token: the one in progress when it came, and its own."""


class Listener:
    """A sink that tells of each token."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard

    def on_output(self, output: TokenOutput) -> None:
        self._heard()

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson]) -> None:
        raise AssertionError("nobody asked")

    def on_failure(self, error: ServingError) -> None:
        raise error


@pytest.mark.parametrize("crowd", [1, 8])
async def test_newcomers_wait_for_one_step_at_most(demo_model: Path, crowd: int) -> None:
    loop = asyncio.get_running_loop()
    async with serve(demo_model, echo_step_ms=STEP_MS) as stack:
        steps = 0
        stepped = asyncio.Event()

        def step_ended() -> None:
            nonlocal steps
            steps += 1
            stepped.set()

        with ExitStack() as running:
            # The first in its slot, it hears of a step before the newcomers do.
            first = Request(RequestId(0), tuple(range(50, 70)), max_new_tokens=2000)
            running.enter_context(run_generation(stack.cluster, first, stack.tokenizer, Listener(step_ended)))
            # Long enough for it to be granted blocks several times.
            for round_ in range(8):
                for _ in range(3):
                    stepped.clear()
                    await stepped.wait()
                waited: list[int] = []
                all_heard = asyncio.Event()

                def heard(came: int, waited: list[int] = waited, all_heard: asyncio.Event = all_heard) -> None:
                    waited.append(steps - came)
                    if len(waited) == crowd:
                        all_heard.set()

                # They come one after another during the first tenth of a step.
                for number in range(crowd):
                    request = Request(RequestId(1000 * (round_ + 1) + number), (60, 61), max_new_tokens=1)
                    came = steps
                    running.enter_context(
                        run_generation(stack.cluster, request, stack.tokenizer, Listener(lambda came=came: heard(came)))
                    )
                    await asyncio.sleep(STEP_MS / 1e3 / 10 / crowd)
                async with asyncio.timeout_at(loop.time() + 10):
                    await all_heard.wait()
                assert max(waited) <= ALLOWED_STEPS
