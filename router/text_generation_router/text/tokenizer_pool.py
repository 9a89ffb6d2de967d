"""Encodes and decodes texts in turn: the shortest on the event loop, the others on threads, long ones piece by piece.

A piece takes tens of milliseconds and some megabytes, and other texts have their turns between two pieces of one text. The
library's `encode_batch` and `decode_batch` release the interpreter's lock while they work, its `encode` does not.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

from text_generation_router.admission_queue import MIN_CHARACTERS, SHORT_CHARACTERS, PendingWork, WorkerQueue
from text_generation_router.errors import ContextLengthExceeded, InvalidRequest
from text_generation_router.request import DEFAULT_TENANT, TenantId, TokenId
from text_generation_router.text.tokenizer import Encoding, Tokenizer, tokenizer_errors

INLINE_CHARACTERS = 1024
"""Texts up to this length are encoded on the event loop, in less than half a millisecond, unless one may backtrack."""
SLOW_INLINE_S = 0.02
"""CPU time of a text on the event loop that is too long."""
SLOW_TEXTS, SLOW_SHARE = 3, 0.001
"""Texts that may take too long, in all and as a share of all; with more, no other is encoded on the event loop. The time of
some is not their own: a garbage collection, or in a virtual machine the wait for a processor."""
INLINE_TOKENS = 512
"""Most tokens that are decoded on the event loop."""
CHARACTERS_PER_TOKEN = 4
"""Length of text that one token counts as, to estimate the time of a decode."""
MIN_WORKERS = 2
"""Fewest threads: one of them is kept for the next tenant."""
MAX_CHARACTERS = 2_000_000
"""Characters of a text."""

T = TypeVar("T")


class TokenizerPool:
    """Threads that encode and decode. Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer, workers: int, stage: PendingWork) -> None:
        workers = max(workers, MIN_WORKERS)
        self._tokenizer = tokenizer
        self._inline = 0 if tokenizer.may_backtrack else INLINE_CHARACTERS
        self._inline_texts = self._slow_texts = 0
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")
        self._turns = WorkerQueue(stage, workers)
        self.vocabulary = tokenizer.vocabulary
        """Token ids are below this."""
        self.slices = asyncio.Lock()
        """Held while the event loop writes a piece of a large answer, so that pieces do not add up to a pause."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_ids(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        tenant: TenantId = DEFAULT_TENANT,
        check: Callable[[int], None] = lambda _: None,
    ) -> Sequence[TokenId]:
        """Return the token ids of `text`. Raises InvalidRequest, Overloaded, CannotKeepUp.

        `check` is called with the number of tokens of each longer beginning of a long text; an error of it ends the work.
        """
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
        [ids] = await self._in_pieces(text, tenant, check, add_special_tokens=add_special_tokens, offsets=False)
        return ids

    async def encode(self, text: str, *, add_special_tokens: bool, tenant: TenantId = DEFAULT_TENANT) -> Encoding:
        """Return the token ids of `text` and the characters of each. Raises as `encode_ids` does."""
        if len(text) <= SHORT_CHARACTERS:
            return await self._on_thread(
                tenant, len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            )
        columns = await self._in_pieces(
            text, tenant, lambda _: None, add_special_tokens=add_special_tokens, offsets=True
        )
        return Encoding(*columns)

    async def decode(self, ids: Sequence[TokenId], tenant: TenantId = DEFAULT_TENANT) -> str:
        """Return the text of `ids`, special tokens included. Raises as `encode_ids` does."""
        characters = len(ids) * CHARACTERS_PER_TOKEN
        if len(ids) <= INLINE_TOKENS:
            with tokenizer_errors():
                return self._tokenizer.decode(ids)
        return await self._on_thread(tenant, characters, lambda: self._tokenizer.decode(ids))

    async def _in_pieces(
        self,
        text: str,
        tenant: TenantId,
        check: Callable[[int], None],
        *,
        add_special_tokens: bool,
        offsets: bool,
    ) -> list[array[int]]:
        """Return the columns of `Tokenizer.encode_piece` for the whole text."""
        if len(text) > MAX_CHARACTERS:
            raise InvalidRequest(
                f"prompt is too long: a text must have at most {MAX_CHARACTERS} characters. Given: {len(text)}",
                code=ContextLengthExceeded.openai_code,
            )
        cuts = await self._on_thread(tenant, MIN_CHARACTERS, lambda: self._tokenizer.cuts)
        before, after = self._tokenizer.surrounding_tokens() if add_special_tokens else ([], [])
        columns = [array("I", before), *(array("I", [0] * len(before)) for _ in range(2 * offsets))]
        for start, stop in cuts.pieces(text):
            check(len(columns[0]))
            work = partial(self._tokenizer.encode_piece, text, start, stop, offsets=offsets)
            for column, more in zip(columns, await self._on_thread(tenant, stop - start, work), strict=True):
                column.extend(more)
        columns[0].extend(after)
        for column in columns[1:]:
            column.extend([0] * len(after))
        return columns

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
