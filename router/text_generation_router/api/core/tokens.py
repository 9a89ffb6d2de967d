"""The tokens of a text as JSON, for /tokenize and /chat_tokenize, written chunk by chunk."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

import orjson
from aiohttp import web

from text_generation_router.request import TokenId
from text_generation_router.text.tokenizer import Encoding
from text_generation_router.web.bodies import ResponseBody, json_parts_response

CHUNK_TOKENS = 512
"""Tokens written at a time: half a millisecond."""
CHUNK_IDS = 16_384
"""Token ids written at a time."""


class SimpleToken(ResponseBody):
    """A token and the bytes of the text that it stands for."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeAnswer(ResponseBody):
    """A rendered conversation and its tokens."""

    tokenize_response: list[SimpleToken]
    templated_text: str


class TokenIdsAnswer(ResponseBody):
    """Tokens of a `prompt`, in vLLM's form."""

    count: int
    max_model_len: int
    tokens: list[int]


async def answer_tokens(
    request: web.Request,
    text: str,
    encoding: Encoding,
    slices: asyncio.Lock,
    *,
    before: bytes = b"",
    after: bytes = b"",
) -> web.StreamResponse:
    """Answer with the list of the tokens of `text`; `before` and `after` are the JSON around the list."""
    chunks = _list_json(simple_tokens(text, encoding), before, after)
    return await json_parts_response(request, _parts(chunks, slices, large=len(encoding.ids) > CHUNK_TOKENS), {})


async def answer_ids(
    request: web.Request, ids: Sequence[TokenId], max_model_len: int, slices: asyncio.Lock
) -> web.StreamResponse:
    """Answer with a TokenIdsAnswer."""
    head = b'{"count":%d,"max_model_len":%d,"tokens":' % (len(ids), max_model_len)
    parts = (list(ids[first : first + CHUNK_IDS]) for first in range(0, len(ids), CHUNK_IDS))
    chunks = _list_json(parts, head, b"}")
    return await json_parts_response(request, _parts(chunks, slices, large=len(ids) > CHUNK_IDS), {})


async def _parts(chunks: Iterator[bytes], slices: asyncio.Lock, *, large: bool) -> AsyncIterator[bytes]:
    """Yield JSON in chunks.

    Half a million tokens are tens of megabytes: they are never held at once. The lock and the pauses leave half of the
    event loop's time to others, however many large answers are written.
    """
    if not large:
        yield b"".join(chunks)
        return
    chunk: bytes | None = b""
    while chunk is not None:
        yield chunk
        async with slices:
            started = time.perf_counter()
            chunk = next(chunks, None)
            await asyncio.sleep(time.perf_counter() - started)


def _list_json(parts: Iterable[Sequence[object]], before: bytes, after: bytes) -> Iterator[bytes]:
    """Yield a list as JSON, a chunk for each part of it; `before` and `after` are the JSON around it."""
    begin = before + b"["
    for part in parts:
        yield begin + orjson.dumps(part)[1:-1]
        begin = b","
    yield (begin if begin != b"," else b"") + b"]" + after


def simple_tokens(text: str, encoding: Encoding) -> Iterator[list[SimpleToken]]:
    """Yield the tokens of a text, CHUNK_TOKENS at a time.

    The tokenizer counts characters, TGI counts bytes. A token that is part of a character stands for all of it.
    """
    at_character = at_byte = 0
    for first in range(0, len(encoding.ids), CHUNK_TOKENS):
        tokens: list[SimpleToken] = []
        chunk = slice(first, first + CHUNK_TOKENS)
        columns = (encoding.ids[chunk], encoding.starts[chunk], encoding.stops[chunk])
        for token_id, start, stop in zip(*columns, strict=True):
            if start == stop:  # added by the tokenizer
                tokens.append({"id": token_id, "text": "", "start": 0, "stop": 0})
                continue
            # Offsets almost always increase, so counting from the last one keeps this linear.
            if start >= at_character:
                at_byte += _bytes(text[at_character:start])
            else:
                at_byte -= _bytes(text[start:at_character])
            at_character = start
            piece = text[start:stop]
            tokens.append({"id": token_id, "text": piece, "start": at_byte, "stop": at_byte + _bytes(piece)})
        yield tokens


def _bytes(text: str) -> int:
    return len(text.encode())
