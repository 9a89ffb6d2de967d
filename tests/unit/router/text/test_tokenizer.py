"""The tokenizer: texts of any length, errors, and the limit of long texts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from text_generation_router.errors import InvalidRequest, Overloaded
from text_generation_router.text.tokenizer import LONG_CHARACTERS, MAX_LONG, Tokenizer, TokenizerError, tokenizer_errors


@pytest.fixture
def tokenizer(demo_model: Path) -> Iterator[Tokenizer]:
    loaded = Tokenizer.load(demo_model, workers=1)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("repeats", [1, 300, 30_000])
async def test_texts_of_any_length_are_encoded_and_decoded(tokenizer: Tokenizer, repeats: int) -> None:
    text = "Grüße " * repeats
    ids = await tokenizer.encode_ids(text, add_special_tokens=False)
    encoding = await tokenizer.encode(text, add_special_tokens=False)
    assert encoding.ids == ids
    assert [text[a:b] for a, b in encoding.offsets[:2]] == [tokenizer.token_text(token_id) for token_id in ids[:2]]
    assert await tokenizer.decode(ids) == text


async def test_special_tokens_in_a_text_are_recognised(tokenizer: Tokenizer) -> None:
    [token_id] = await tokenizer.encode_ids("<|im_end|>", add_special_tokens=False)
    assert tokenizer.special_texts[token_id] == tokenizer.token_text(token_id) == "<|im_end|>"
    assert tokenizer.token_bytes(token_id) == b"<|im_end|>"


async def test_too_many_long_texts_are_refused_and_short_ones_are_not(tokenizer: Tokenizer) -> None:
    text = "x " * (LONG_CHARACTERS // 2 + 1)
    refused = 0

    async def encode() -> None:
        nonlocal refused
        try:
            await tokenizer.encode_ids(text, add_special_tokens=False)
        except Overloaded:
            refused += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(MAX_LONG + 2):
            tasks.create_task(encode())
        await asyncio.sleep(0)
        assert len(await tokenizer.encode_ids("x " * 1000, add_special_tokens=False)) > 1000
    assert refused == 2
    await encode()
    assert refused == 2


def test_a_folder_without_a_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path, workers=1)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path, workers=1)


def test_errors_of_the_library_are_errors_of_the_request() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer error oops"), tokenizer_errors():
        raise ValueError("oops")
    with pytest.raises(Overloaded), tokenizer_errors():
        raise Overloaded
