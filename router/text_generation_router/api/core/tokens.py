"""A text's tokens as JSON, for /tokenize and /chat_tokenize: written as they are made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import orjson
from aiohttp import hdrs, web

from text_generation_router.text.tokenizer import Encoding

CHUNK_TOKENS = 4096
"""Tokens written down at a time: a few milliseconds."""


async def answer_tokens(
    request: web.Request, text: str, encoding: Encoding, *, before: bytes = b"", after: bytes = b""
) -> web.StreamResponse:
    """The list of the tokens of `text`, as an answer; `before` and `after` are the JSON around the list.

    Half a million tokens are tens of megabytes: they are never held whole, and others have their turn between chunks.
    """
    chunks = tokens_json(text, encoding)
    if len(encoding.ids) <= CHUNK_TOKENS:
        return web.Response(body=before + b"".join(chunks) + after, content_type="application/json")
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "application/json"})
    await response.prepare(request)
    if before:
        await response.write(before)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(0)
    await response.write_eof(after)
    return response


def tokens_json(text: str, encoding: Encoding) -> Iterator[bytes]:
    """The answer of /tokenize, in pieces of CHUNK_TOKENS tokens.

    The tokenizer counts characters, TGI counts bytes. A token that is part of a character stands for all of it.
    """
    at_character = at_byte = 0
    before = b"["
    for first in range(0, len(encoding.ids), CHUNK_TOKENS):
        tokens: list[dict[str, object]] = []
        chunk = slice(first, first + CHUNK_TOKENS)
        for token_id, (start, stop) in zip(encoding.ids[chunk], encoding.offsets[chunk], strict=True):
            if start == stop:  # added by the tokenizer
                tokens.append({"id": token_id, "text": "", "start": 0, "stop": 0})
                continue
            # Offsets all but always rise, so walking from the last one keeps this linear.
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
