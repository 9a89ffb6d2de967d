"""The tokens of a text as JSON, for /tokenize and /chat_tokenize, written chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import orjson
from aiohttp import hdrs, web

from text_generation_router.api.http.bodies import JSON, ResponseBody
from text_generation_router.text.tokenizer import Encoding

CHUNK_TOKENS = 4096
"""Tokens written at a time: a few milliseconds."""


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


async def answer_tokens(
    request: web.Request, text: str, encoding: Encoding, *, before: bytes = b"", after: bytes = b""
) -> web.StreamResponse:
    """Answer with the list of the tokens of `text`; `before` and `after` are the JSON around the list.

    Half a million tokens are tens of megabytes: they are never held at once, and other requests run between chunks.
    """
    chunks = tokens_json(text, encoding)
    if len(encoding.ids) <= CHUNK_TOKENS:
        return web.Response(body=before + b"".join(chunks) + after, content_type=JSON)
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: JSON})
    await response.prepare(request)
    if before:
        await response.write(before)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(0)
    await response.write_eof(after)
    return response


def tokens_json(text: str, encoding: Encoding) -> Iterator[bytes]:
    """A list of SimpleToken, in chunks of CHUNK_TOKENS tokens.

    The tokenizer counts characters, TGI counts bytes. A token that is part of a character stands for all of it.
    """
    at_character = at_byte = 0
    before = b"["
    for first in range(0, len(encoding.ids), CHUNK_TOKENS):
        tokens: list[SimpleToken] = []
        chunk = slice(first, first + CHUNK_TOKENS)
        for token_id, (start, stop) in zip(encoding.ids[chunk], encoding.offsets[chunk], strict=True):
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
        yield before + orjson.dumps(tokens)[1:-1]
        before = b","
    yield b"[]" if not encoding.ids else b"]"


def _bytes(text: str) -> int:
    return len(text.encode())
