"""A panic of the tokenizer's Rust library is the error of one request: a model whose expressions take exponential time."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from every_dialect import STREAMED, VERBATIM, WHOLE, Asking, name
from http_stack import Stack, serve

from text_generation_common.panics import PanicError

pytestmark = pytest.mark.asyncio(loop_scope="module")

PANICS_WHEN_READ = "x" * 40
PANICS_WHEN_WRITTEN = "y" * 40
HARMLESS = "one two three"
MOST_PANICS = 3
"""Times the processor time of one panic that the event loop may stand still. Such a text takes seconds if nothing bounds it."""


def catastrophic(letter: str) -> dict[str, str]:
    """A pattern that the library gives up on after 0.2 s: the letter may be read in 4 ways each time."""
    return {"Regex": "(?:" + "|".join(4 * letter) + ")+Z"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(demo_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": catastrophic("x"), "behavior": "Isolated", "invert": False}
    replace = {"type": "Replace", "pattern": catastrophic("y"), "content": ""}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], replace]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    async with serve(folder, chat_template=VERBATIM) as stack:
        yield stack


@pytest.fixture(scope="module")
def panic_s(stack: Stack) -> float:
    """Processor time in which the library gives up, with a backtrace."""
    started = time.thread_time()
    with pytest.raises(PanicError):
        stack.tokenizer.encode(PANICS_WHEN_READ, add_special_tokens=False)
    return time.thread_time() - started


async def longest_turn() -> float:
    """Measure the most processor time between two turns of the event loop, until cancelled."""
    longest, last = 0.0, time.thread_time()
    try:
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest


async def post(stack: Stack, path: str, body: Any) -> tuple[int, bytes]:  # noqa: ANN401
    async with stack.client.post(path, json=body) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("asking", WHOLE, ids=name)
async def test_a_text_that_cannot_be_read_is_refused_and_holds_nothing_up(
    stack: Stack, panic_s: float, asking: Asking
) -> None:
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(longest_turn())
        status, reply = await post(stack, asking.path, asking.body(PANICS_WHEN_READ, 3))
        watching.cancel()
    assert status == asking.invalid
    assert b"tokenizer error" in reply
    assert b"Regex" not in reply or len(reply) < 500
    assert (await post(stack, asking.path, asking.body(HARMLESS, 3)))[0] == 200
    assert watching.result() < MOST_PANICS * panic_s


@pytest.mark.parametrize("path", ["/tokenize", "/chat_tokenize", "/v1/messages/count_tokens"])
async def test_it_cannot_be_tokenized_either(stack: Stack, path: str) -> None:
    body = {"inputs": PANICS_WHEN_READ, "messages": [{"role": "user", "content": PANICS_WHEN_READ}]}
    status, reply = await post(stack, path, body)
    assert status == (400 if path.startswith("/v1/") else 422)
    assert b"tokenizer error" in reply


@pytest.mark.parametrize("asking", STREAMED, ids=name)
async def test_a_token_that_cannot_be_written_ends_its_stream_alone(stack: Stack, asking: Asking) -> None:
    async with asyncio.TaskGroup() as tasks:
        other = tasks.create_task(stack.generate(HARMLESS, max_new_tokens=200))
        status, reply = await post(stack, asking.path, asking.streamed(PANICS_WHEN_WRITTEN, 40))
    assert status in (200, 424 if asking.is_tgi else 500)
    assert b"internal error" in reply
    assert len(other.result()["generated_text"]) > 100
    await stack.assert_empty()
