"""Encodes and decodes texts in turn: the shortest on the event loop, short ones on threads, long ones in processes.

A long text takes up to seconds and hundreds of megabytes. In a process of its own it holds neither the interpreter's lock
nor the router's memory. The library's `encode_batch` releases the lock while it works, its `encode` does not.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

from text_generation_router.errors import InvalidRequest, Unhealthy
from text_generation_router.preparation import SHORT_CHARACTERS, Preparation, WorkerQueue
from text_generation_router.request import DEFAULT_TENANT, TenantId, TokenId
from text_generation_router.sandbox.pool import Sandbox, SandboxBroken, SandboxError
from text_generation_router.text.tokenizer import Encoding, Tokenizer, tokenizer_errors
from text_generation_router.text.tokenizer_job import Flags

INLINE_CHARACTERS = 1024
"""Texts up to this length are encoded on the event loop, in less than half a millisecond, unless one may backtrack."""
SLOW_INLINE_S = 0.02
"""CPU time of a text on the event loop that is too long."""
SLOW_TEXTS, SLOW_SHARE = 3, 0.001
"""Texts that may take too long, in all and as a share of all; with more, no other is encoded on the event loop. The time of
some is not their own: a garbage collection, or in a virtual machine the wait for a processor."""
INLINE_TOKENS = 512
"""Up to so many tokens are decoded on the event loop."""
CHARACTERS_PER_TOKEN = 4
"""Length of text that one token counts as, to estimate the time of a decode."""
MIN_WORKERS = 2
"""Fewest threads, and fewest processes: one of them is kept for the next tenant."""
TIMEOUT_S = 20.0
"""CPU time of one long text."""
MEMORY_BYTES = 2 << 30
"""Memory of a process, for 2 MB of text a few hundred megabytes."""
MAX_CHARACTERS = 2_000_000
"""Characters of a text."""
MAX_OUTPUT = 1 << 28
"""Bytes of a result: 12 for a token with its offsets."""

T = TypeVar("T")


class TokenizerPool:
    """Workers that encode and decode. Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, workers: int, stage: Preparation) -> None:
        """`folder` holds the tokenizer.json that the processes read; they start with the first long text."""
        workers = max(workers, MIN_WORKERS)
        self._tokenizer = tokenizer
        self._inline = 0 if tokenizer.may_backtrack else INLINE_CHARACTERS
        self._inline_texts = self._slow_texts = 0
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")
        self._turns = WorkerQueue(stage, workers)
        self._processes = Sandbox(
            "text_generation_router.text.tokenizer_job:tokenizer_job",
            {"tokenizer": str(folder / "tokenizer.json")},
            workers=workers,
            timeout_s=TIMEOUT_S,
            memory_bytes=MEMORY_BYTES,
            max_output=MAX_OUTPUT,
            stage=stage,
        )
        self.vocabulary = tokenizer.vocabulary
        """Token ids are below this."""
        self.slices = asyncio.Lock()
        """Held while the event loop writes a piece of a large answer, so that pieces do not add up to a pause."""

    async def __aenter__(self) -> Self:
        await self._processes.open(lazily=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._processes.close()

    async def encode_ids(
        self, text: str, *, add_special_tokens: bool, tenant: TenantId = DEFAULT_TENANT
    ) -> Sequence[TokenId]:
        """Return the token ids of `text`. Raises InvalidRequest, Overloaded, CannotKeepUp, Unhealthy."""
        size = len(text)
        if size <= self._inline:
            started = time.thread_time()
            try:
                with tokenizer_errors():
                    return self._tokenizer.encode_ids(text, add_special_tokens=add_special_tokens)
            finally:
                self._inline_texts += 1
                if time.thread_time() - started > SLOW_INLINE_S:
                    self._slow_texts += 1
                    if self._slow_texts > SLOW_TEXTS + SLOW_SHARE * self._inline_texts:
                        self._inline = 0
        if size <= SHORT_CHARACTERS:
            return await self._on_thread(
                tenant, size, lambda: self._tokenizer.encode_ids(text, add_special_tokens=add_special_tokens)
            )
        return array("I", await self._in_process(tenant, _payload(_special(add_special_tokens), text)))

    async def encode(self, text: str, *, add_special_tokens: bool, tenant: TenantId = DEFAULT_TENANT) -> Encoding:
        """Return the token ids of `text` and the characters of each. Raises as `encode_ids` does."""
        if len(text) <= SHORT_CHARACTERS:
            return await self._on_thread(
                tenant, len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            )
        payload = _payload(Flags.OFFSETS | _special(add_special_tokens), text)
        # Views: up to 12 bytes a character that are not copied.
        numbers = memoryview(await self._in_process(tenant, payload)).cast("I")
        count = len(numbers) // 3
        return Encoding(numbers[:count], numbers[count : 2 * count], numbers[2 * count :])

    async def decode(self, ids: Sequence[TokenId], tenant: TenantId = DEFAULT_TENANT) -> str:
        """Return the text of `ids`, special tokens included. Raises as `encode_ids` does."""
        characters = len(ids) * CHARACTERS_PER_TOKEN
        if len(ids) <= INLINE_TOKENS:
            with tokenizer_errors():
                return self._tokenizer.decode(ids)
        if characters <= SHORT_CHARACTERS:
            return await self._on_thread(tenant, characters, lambda: self._tokenizer.decode(ids))
        payload = bytes([Flags.DECODE]) + array("I", ids).tobytes()
        return (await self._in_process(tenant, payload)).decode()

    async def _on_thread(self, tenant: TenantId, characters: int, work: Callable[[], T]) -> T:
        turn = await self._turns.take(tenant, characters)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)

        def end(done: asyncio.Future[T]) -> None:
            self._turns.give_back(turn)
            if not done.cancelled():
                done.exception()  # if the caller left, nothing else retrieves it

        running.add_done_callback(end)  # the thread is busy until the work ends, also if the caller leaves
        with tokenizer_errors():
            return await asyncio.shield(running)

    async def _in_process(self, tenant: TenantId, payload: bytes) -> bytes:
        try:
            return await self._processes.call(payload, tenant)
        except SandboxBroken as error:
            raise Unhealthy("long texts cannot be tokenized now") from error
        except SandboxError as error:
            raise InvalidRequest(f"tokenizer error {error}") from error


def _special(add_special_tokens: bool) -> Flags:  # noqa: FBT001 - the only argument
    return Flags.SPECIAL if add_special_tokens else Flags(0)


def _payload(flags: Flags, text: str) -> bytes:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"a text must have at most {MAX_CHARACTERS} characters. Given: {len(text)}")
    return bytes([flags]) + text.encode()
