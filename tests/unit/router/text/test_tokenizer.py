"""The tokenizer: texts of any length, errors, and turns between tenants."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from text_generation_router.admission_queue import PendingWork
from text_generation_router.errors import InvalidRequest, Overloaded
from text_generation_router.request import TenantId
from text_generation_router.text.tokenizer import Tokenizer, TokenizerError, tokenizer_errors
from text_generation_router.text.tokenizer_pool import MAX_CHARACTERS, TokenizerPool


@pytest.fixture
async def pool(demo_model: Path) -> AsyncIterator[TokenizerPool]:
    async with TokenizerPool(Tokenizer.load(demo_model), 1, PendingWork()) as started:
        yield started


@pytest.mark.parametrize("repeats", [1, 300, 30_000], ids=["inline", "thread", "pieces"])
async def test_texts_of_any_length_are_encoded_and_decoded(pool: TokenizerPool, demo_model: Path, repeats: int) -> None:
    text = "Grüße <|im_end|>" * repeats
    expected = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(text)
    ids = await pool.encode_ids(text, add_special_tokens=False)
    encoding = await pool.encode(text, add_special_tokens=False)
    assert list(ids) == list(encoding.ids) == expected.ids
    assert list(zip(encoding.starts, encoding.stops, strict=True)) == expected.offsets
    assert await pool.decode(ids) == text


async def test_a_long_text_is_put_between_special_tokens(demo_model: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    special = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    library.post_processor = TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=special)
    text = "Grüße aus Köln. " * 3_000
    expected = library.encode(text)
    async with TokenizerPool(Tokenizer(library), 1, PendingWork()) as pool:
        assert list(await pool.encode_ids(text, add_special_tokens=True)) == expected.ids
        encoding = await pool.encode(text, add_special_tokens=True)
    assert list(encoding.ids) == expected.ids
    assert list(zip(encoding.starts, encoding.stops, strict=True)) == expected.offsets


async def test_a_text_that_is_too_long_is_refused(pool: TokenizerPool) -> None:
    for encode in (pool.encode_ids, pool.encode):
        with pytest.raises(InvalidRequest, match="at most 2000000 characters"):
            await encode(" " * (MAX_CHARACTERS + 1), add_special_tokens=False)


def test_special_tokens_in_a_text_are_recognised(demo_model: Path) -> None:
    tokenizer = Tokenizer.load(demo_model)
    [token_id] = tokenizer.encode_ids("<|im_end|>", add_special_tokens=False)
    assert tokenizer.special_texts[token_id] == tokenizer.token_text(token_id) == "<|im_end|>"
    assert tokenizer.token_bytes(token_id) == b"<|im_end|>"


async def test_long_texts_of_one_tenant_delay_no_other(pool: TokenizerPool) -> None:
    async with asyncio.TaskGroup() as tasks:
        noisy = [
            tasks.create_task(pool.encode_ids("x " * 200_000, add_special_tokens=False, tenant=TenantId("noisy")))
            for _ in range(8)
        ]
        for text in ("x " * 1000, "x " * 20_000):
            assert len(await pool.encode_ids(text, add_special_tokens=False, tenant=TenantId("quiet"))) >= 1000
        assert sum(task.done() for task in noisy) <= 4
        for task in noisy:
            task.cancel()


def test_a_folder_without_a_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_hostile_tokenizer_is_refused_without_memory(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = ByteLevel()
    path.write_text(re.sub(r'("a": ?)0', r"\g<1>4000000000", tokenizer.to_str()))
    with pytest.raises(TokenizerError, match="it has the token id 4000000000, above 4194303"):
        Tokenizer.load(tmp_path)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is larger than 128 MiB"):
        Tokenizer.load(tmp_path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(TokenizerError, match=r"'tokenizer\.json' leads out of the model folder, to /etc/passwd"):
        Tokenizer.load(tmp_path)


def test_errors_of_the_library_are_errors_of_the_request() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer error oops"), tokenizer_errors():
        raise ValueError("oops")
    with pytest.raises(Overloaded), tokenizer_errors():
        raise Overloaded
