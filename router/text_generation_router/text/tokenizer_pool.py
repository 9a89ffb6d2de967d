"""Encodes and decodes texts in turn: the shortest on the event loop, the others on threads, long ones piece by piece.

Some pieces take milliseconds, and then other texts have their turns. A text that comes again with something new at its end
costs little more than what is new. The library's `encode_batch` and `decode_batch` release the interpreter's lock while they
work, its `encode` does not.

Equal texts are cut into equal pieces up to the last one. Pieces are found by a digest; their texts are not kept. Tenants
find only their own, so the time of an answer tells nothing of another tenant's texts.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from threading import Lock
from typing import NamedTuple, Self, TypeVar

from text_generation_router.admission_queue import MIN_CHARACTERS, SHORT_CHARACTERS, PendingWork, WorkerQueue
from text_generation_router.errors import ContextLengthExceeded, InvalidRequest
from text_generation_router.request import DEFAULT_TENANT, TenantId, TokenId
from text_generation_router.text.tokenizer import Encoding, Tokenizer, tokenizer_errors

MAX_CACHED_BYTES = 64 << 20
"""Memory of all pieces: some 16 million tokens."""
PIECE_BYTES = 300
"""Memory of a piece beside its token ids."""

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
PIECES_A_TURN = 3
"""Pieces that are encoded before other texts have their turn: some milliseconds."""
MAX_CHARACTERS = 2_000_000
"""Characters of a text."""

T = TypeVar("T")


def piece_digest(salt: str, text: str, start: int, stop: int) -> bytes:
    """Return the digest of all that the tokens of `text[start:stop]` depend on, which is also the character before."""
    place = "inner" if start else "first"
    return sha256(f"{len(salt)} {salt}{place}{text[max(start - 1, 0) : stop]}".encode()).digest()


class PieceCache:
    """Pieces of bounded memory in all. The tenant with the most loses its least recently used. Safe to share by threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.bytes = 0
        """Memory of all pieces."""
        self._lock = Lock()
        self._pieces: dict[TenantId, OrderedDict[bytes, array[int]]] = {}
        """By tenant, least recently used first. No tenant is without a piece."""
        self._bytes: dict[TenantId, int] = {}
        """Memory of the pieces of each tenant."""

    def get(self, tenant: TenantId, digest: bytes) -> array[int] | None:
        """Return the token ids of a piece, or None. They must not be changed."""
        with self._lock:
            pieces = self._pieces.get(tenant)
            if pieces is None or (ids := pieces.get(digest)) is None:
                return None
            pieces.move_to_end(digest)
            return ids

    def put(self, tenant: TenantId, digest: bytes, ids: array[int]) -> None:
        """Keep the token ids of a piece."""
        with self._lock:
            pieces = self._pieces.setdefault(tenant, OrderedDict())
            if digest not in pieces:
                pieces[digest] = ids
                self._add(tenant, _memory(ids))
            if self.bytes > self._max_bytes:
                self._evict()

    def _evict(self) -> None:
        """Give back a part of what the tenant with the most has, so that tenants are seldom compared."""
        tenant = max(self._bytes, key=self._bytes.__getitem__)
        pieces, wanted = self._pieces[tenant], self.bytes - self._max_bytes + self._bytes[tenant] // 16
        while wanted > 0 and pieces:
            size = _memory(pieces.popitem(last=False)[1])
            wanted -= size
            self._add(tenant, -size)
        if not pieces:
            del self._pieces[tenant], self._bytes[tenant]

    def _add(self, tenant: TenantId, size: int) -> None:
        self.bytes += size
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size


def _memory(ids: array[int]) -> int:
    return PIECE_BYTES + ids.itemsize * len(ids)


class _Piece(NamedTuple):
    start: int
    stop: int
    digest: bytes
    """Its name in the cache; empty: it is not looked for there."""
    columns: Sequence[array[int]]
    """The columns of `Tokenizer.encode_piece`; empty until it is encoded."""


class TokenizerPool:
    """Threads that encode and decode. Belongs to one event loop."""

    def __init__(
        self, tokenizer: Tokenizer, workers: int, stage: PendingWork, max_cached_bytes: int = MAX_CACHED_BYTES
    ) -> None:
        workers = max(workers, MIN_WORKERS)
        self._tokenizer = tokenizer
        self._inline = 0 if tokenizer.may_backtrack else INLINE_CHARACTERS
        self._inline_texts = self._slow_texts = 0
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")
        self._turns = WorkerQueue(stage, workers)
        self._cache = PieceCache(max_cached_bytes)
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
        salt: str = "",
        check: Callable[[int], None] = lambda _: None,
    ) -> Sequence[TokenId]:
        """Return the token ids of `text`. Raises InvalidRequest, Overloaded, CannotKeepUp.

        `check` is called with the number of tokens of each longer beginning of a long text; an error of it ends the work. The
        pieces of a long text are kept for texts of the same tenant and `salt`.
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
        [ids] = await self._in_pieces(text, tenant, check, add_special_tokens=add_special_tokens, salt=salt)
        return ids

    async def encode(self, text: str, *, add_special_tokens: bool, tenant: TenantId = DEFAULT_TENANT) -> Encoding:
        """Return the token ids of `text` and the characters of each. Raises as `encode_ids` does."""
        if len(text) <= SHORT_CHARACTERS:
            return await self._on_thread(
                tenant, len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            )
        columns = await self._in_pieces(text, tenant, lambda _: None, add_special_tokens=add_special_tokens)
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
        salt: str | None = None,
    ) -> list[array[int]]:
        """Return the columns of `Tokenizer.encode_piece` for the whole text: with a `salt` from the cache, and only the ids."""
        if len(text) > MAX_CHARACTERS:
            raise InvalidRequest(
                f"prompt is too long: a text must have at most {MAX_CHARACTERS} characters. Given: {len(text)}",
                code=ContextLengthExceeded.openai_code,
            )
        before, after = self._tokenizer.surrounding_tokens() if add_special_tokens else ([], [])
        offsets = salt is None
        columns = [array("I", before), *(array("I", [0] * len(before)) for _ in range(2 * offsets))]
        pieces, ahead = self._pieces(text, tenant, salt), list[_Piece]()

        def encode_ahead() -> None:
            for piece in ahead:
                new = piece.columns or self._tokenizer.encode_piece(text, piece.start, piece.stop, offsets=offsets)
                if piece.digest and not piece.columns:
                    self._cache.put(tenant, piece.digest, new[0])
                for column, more in zip(columns, new, strict=True):
                    column.extend(more)
            ahead.clear()
            missing = 0
            while missing < PIECES_A_TURN and (following := next(pieces, None)):
                ahead.append(following)
                missing += not following.columns

        await self._on_thread(tenant, MIN_CHARACTERS, encode_ahead)
        while ahead:
            check(len(columns[0]))
            size = sum(piece.stop - piece.start for piece in ahead if not piece.columns)
            await self._on_thread(tenant, size, encode_ahead)
        columns[0].extend(after)
        for column in columns[1:]:
            column.extend([0] * len(after))
        return columns

    def _pieces(self, text: str, tenant: TenantId, salt: str | None) -> Iterator[_Piece]:
        """Yield the pieces of a text, with the token ids of those in the cache."""
        for start, stop in self._tokenizer.cuts.pieces(text):
            digest = b"" if salt is None else piece_digest(salt, text, start, stop)
            ids = self._cache.get(tenant, digest) if digest else None
            yield _Piece(start, stop, digest, () if ids is None else (ids,))

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
