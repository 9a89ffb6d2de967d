"""Texts that come again with changes have the tokens of the whole text, whatever the cache holds of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from corpus import CORPUS
from full_grid import full
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from text_generation_router.admission_queue import PendingWork
from text_generation_router.request import TenantId
from text_generation_router.text import cuts, tokenizer_pool
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.text.tokenizer_pool import TokenizerPool

SMALL = Path(__file__).parents[1] / "corpus" / "tokenizers"
KINDS = ("model", full("with a space before"), full("qwen3"), "deepseek-v3")
PARTS = [
    "the words of a text, in 1234 lines.\n", "<|im_end|>\n<|im_start|>user\n", "It's a.b(c) = 12.5 / 3\n\n\tx", " ", "\n", "é",
    "I'm", "word", "1", "中文、です。", "🙂", '{"a":true}', "<|end|>", "<|im_", *CORPUS.values(),
]  # fmt: skip
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 1),  # the text
        st.integers(0, 1),  # its tenant
        st.sampled_from(["", "salt"]),
        st.sampled_from([0.0, 1.0]) | st.floats(0, 1),  # the place of the change
        st.integers(0, 1) | st.integers(0, 60),  # the characters that go
        st.lists(st.sampled_from(PARTS), max_size=12).map("".join),  # the text that comes
    ),
    min_size=1,
    max_size=6,
)
OTHER_ENDS = [(0, 0, "", 1.0, 1, end) for end in "xyz "]
GROWING = [(0, 0, "", 1.0, 0, part * 9) for part in PARTS[:4]]


@pytest.fixture(scope="module", autouse=True)
def short_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "PIECE_CHARACTERS", 15)
        patch.setattr(tokenizer_pool, "INLINE_CHARACTERS", 0)
        patch.setattr(tokenizer_pool, "SHORT_CHARACTERS", 0)
        yield


@cache
def made(kind: str, model: Path) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    """A tokenizer of the library that puts a token before and after a text, and ours."""
    folder = SMALL / kind if (SMALL / kind).exists() else model
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if kind == "with a space before":
        library.pre_tokenizer = ByteLevel(add_prefix_space=True)
    first = min(library.get_added_tokens_decoder())
    name = library.id_to_token(first)
    library.post_processor = TemplateProcessing(single=f"{name} $A {name}", special_tokens=[(name, first)])
    ours = Tokenizer(tokenizers.Tokenizer.from_str(library.to_str()))
    assert ours.cuts is not None  # made with the first use
    return library, ours


@pytest.mark.parametrize("kind", KINDS)
@example(changes=GROWING, max_cached_bytes=1 << 20, special=True)
@example(changes=OTHER_ENDS, max_cached_bytes=1 << 20, special=True)
@example(changes=GROWING + GROWING[::-1], max_cached_bytes=1500, special=False)
@given(changes=CHANGES, max_cached_bytes=st.sampled_from([0, 1500, 1 << 20]), special=st.booleans())
def test_a_resent_text_has_the_tokens_of_the_whole_text(
    kind: str,
    demo_model: Path,
    changes: list[tuple[int, int, str, float, int, str]],
    max_cached_bytes: int,
    special: bool,
) -> None:
    library, ours = made(kind, demo_model)
    texts = [PARTS[0] * 6] * 2

    async def resend() -> None:
        async with TokenizerPool(ours, 2, PendingWork(), max_cached_bytes) as pool:
            for number, tenant, salt, place, gone, new in changes:
                at = int(place * max(len(texts[number]) - gone, 0))
                texts[number] = text = texts[number][:at] + new + texts[number][at + gone :]
                expected = library.encode(text, add_special_tokens=special)
                user = TenantId(str(tenant))
                ids = await pool.encode_ids(text, add_special_tokens=special, tenant=user, salt=salt)
                encoding = await pool.encode(text, add_special_tokens=special, tenant=user)
                assert list(ids) == list(encoding.ids) == expected.ids
                assert list(zip(encoding.starts, encoding.stops, strict=True)) == expected.offsets

    asyncio.run(resend())
