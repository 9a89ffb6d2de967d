"""Joined pieces equal the text decoded whole: 20 scripts, emoji, and any bytes that a model may generate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from corpus import CORPUS
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from text_generation_router.text import tokenizer as router_text
from text_generation_router.text.tokenizer import ByteLevelDetokenizer, StreamDetokenizer


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> Tokenizer:
    return tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """A SentencePiece-like tokenizer with byte fallback, as Llama 2 and Mistral have."""
    words = ["▁", "▁Hello", "▁world", "▁the", "lo", "Hel", "é", "▁x"]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


@cache
def wrapped(tokenizer: Tokenizer) -> router_text.Tokenizer:
    return router_text.Tokenizer(tokenizer)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = wrapped(tokenizer).detokenizer(prompt)
    return [*(detokenizer.step(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("script", CORPUS)
def test_pieces_join_to_the_text_and_hold_no_half_characters(tokenizer: Tokenizer, script: str) -> None:
    ids = tokenizer.encode(CORPUS[script]).ids
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == CORPUS[script]
    assert not any("\ufffd" in part for part in parts)


@settings(deadline=None)
@given(ids=st.lists(st.integers(17, 49151) | st.integers(100, 400), max_size=40))
def test_pieces_of_any_tokens_join_to_the_text_decoded_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_an_incomplete_character_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🏳").ids[:-1]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "\ufffd"


def test_an_id_outside_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [1 << 19]) == ["", ""]


def test_an_added_token_outside_the_byte_alphabet_stands_for_its_text(demo_model: Path) -> None:
    extended = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    extended.add_tokens(["two wörds"])
    assert pieces(extended, extended.encode("two wörds").ids) == ["two wörds", ""]


def test_byte_level_vocabularies_have_their_own_detokenizer(tokenizer: Tokenizer, metaspace: Tokenizer) -> None:
    assert isinstance(wrapped(tokenizer).detokenizer(()), ByteLevelDetokenizer)
    assert isinstance(wrapped(metaspace).detokenizer(()), StreamDetokenizer)


def test_a_sentencepiece_token_keeps_its_leading_space_after_a_prompt(metaspace: Tokenizer) -> None:
    hello, world = 1, 2
    assert pieces(metaspace, [world, world], prompt=[hello]) == [" world", " world", ""]


def test_bytes_of_a_fallback_tokenizer_wait_for_their_character(metaspace: Tokenizer) -> None:
    first = 8  # <0x00>
    ids = [1, *(first + byte for byte in "日".encode())]
    assert pieces(metaspace, ids, prompt=[2]) == [" Hello", "", "", "日", ""]


def test_the_text_goes_on_after_the_decoder_rewrote_its_prefix(metaspace: Tokenizer) -> None:
    first = 8  # <0x00>
    ids = [first + 0x41, first + 0x97, 1, 4, first + 0xE6]  # the second byte makes the first one ill-formed, too
    assert pieces(metaspace, ids, prompt=[1]) == ["A", "", "� Hello", "lo", "", "�"]


@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7]) | st.characters(codec="utf-8"), max_size=20))
def test_words_and_fallback_bytes_join_to_the_text_decoded_whole(metaspace: Tokenizer, words: list[int | str]) -> None:
    # Ill-formed runs of bytes are left out: that decoder decides about a run at its end, which a stream does not know.
    prompt, ids = [1], []
    for word in words:
        ids += [word] if isinstance(word, int) else [8 + byte for byte in word.encode()]
    assert "".join(pieces(metaspace, ids, prompt)) == metaspace.decode([*prompt, *ids])[len(metaspace.decode(prompt)) :]
