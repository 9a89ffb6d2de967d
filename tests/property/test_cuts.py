"""Pieces of a text have the tokens of the whole, for the kinds of tokenizers that models have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from corpus import CORPUS
from hypothesis import example, given, note
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from text_generation_router.errors import InvalidRequest
from text_generation_router.text import cuts
from text_generation_router.text import tokenizer as text

GPT_4 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GROUPS_FROM_THE_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"
ADDED = [
    AddedToken("<|im_end|>", special=True),
    AddedToken("sop", special=True),
    AddedToken("two words", normalized=True),
    AddedToken("BOLD FACE", normalized=True),
    AddedToken("<mask>", lstrip=True, rstrip=True),
    AddedToken("alone", single_word=True),
    AddedToken("taken", rstrip=True, normalized=False),
]
WORDS = [
    "a", "the", "I'm", "Hello", "world", "1", "12", "1234567", "née", "words", "two", "sop", "alone", "taken", "<mask>",
    "<|im_end|>", "two words", "\u09b9\u09df, ",
]  # fmt: skip
TRAINED = [
    *CORPUS.values(),
    *("the words of a text, in 1234 lines: the world's; a.b(c) = 12.5 / 3\n\n\tHello   world" for _ in range(9)),
    *WORDS * 9,
]


def trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(TRAINED, trainer)
    return tokenizer


def byte_level(
    *before: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    use_regex: bool = False,
    prefix: bool = False,
) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=True))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)]
    )
    made.decoder, made.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=True)
    return trained(
        made,
        trainers.BpeTrainer(vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


UNSPLIT = pre_tokenizers.Sequence([])


def sentencepiece(
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    training: pre_tokenizers.PreTokenizer,
) -> Tokenizer:
    """A BPE vocabulary of characters with byte fallback; `training`: the pre-tokenizer for the merges."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer, made.decoder = training, decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>"], limit_alphabet=200, show_progress=False)
    trained(made, trainer).pre_tokenizer = pre_tokenizer
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return trained(
        made, trainers.UnigramTrainer(vocab_size=600, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    )


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return trained(made, trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]"], show_progress=False))


def few_merges() -> Tokenizer:
    merges = [("d", "▁"), ("d▁", "w"), ("a", "≠"), ("h", "e")]
    tokens = dict.fromkeys(["<unk>", *sorted({*"".join(TRAINED), *"▁≠="}), *map("".join, merges)])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("s;", "≠"), SPACE_MARK])
    return made


SPACE_MARK = normalizers.Replace(" ", "▁")
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level(use_regex=True),
    "gpt-2 with a space before": lambda: byte_level(use_regex=True, prefix=True),
    "gpt-4": lambda: byte_level(split(GPT_4)),
    "llama 3": lambda: byte_level(split(LLAMA_3)),
    "o200k": lambda: byte_level(split(O200K)),
    "qwen": lambda: byte_level(split(LLAMA_3.replace("{1,3}", "")), normalizer=normalizers.NFC()),
    "deepseek": lambda: byte_level(*map(split, DEEPSEEK)),
    "groups from the right": lambda: byte_level(split(GROUPS_FROM_THE_RIGHT), use_regex=True),
    "llama 2": lambda: sentencepiece(
        normalizers.Sequence([normalizers.Prepend("▁"), SPACE_MARK]),
        None,
        pre_tokenizers.Split("▁", "merged_with_next"),
    ),
    "gemma": lambda: sentencepiece(
        SPACE_MARK, pre_tokenizers.Split(" ", "merged_with_previous"), pre_tokenizers.Split("▁", "merged_with_next")
    ),
    "mistral": lambda: sentencepiece(
        None,
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        pre_tokenizers.Metaspace(prepend_scheme="first"),
    ),
    "t5": unigram,
    "bert": wordpiece,
    "scripts": lambda: byte_level(pre_tokenizers.UnicodeScripts(), use_regex=True),
    "some tokens over words": few_merges,
    "tokens over words": lambda: sentencepiece(SPACE_MARK, UNSPLIT, UNSPLIT),
    "byte tokens over words": lambda: byte_level(),
    "chunks of seven": lambda: byte_level(split(".{1,7}")),
}
UNCUT = {"tokens over words", "byte tokens over words", "chunks of seven"}
PROSE = CORPUS["cyrillic"] + ": the words of a text, in 1234 lines.\n" * 4
PARTS = [
    *WORDS, *CORPUS.values(), "中文", "です", "한국", "हिन्दी", "e\u0301", "a=\u0338", "words and words", "two  words",
    *" " * 6, "  ", "\r\n", "\n\n",
    *" \n\t,.;:'\"_-/()[]{}<>|=+*&^%$#@!?`~\\、。，！▁²ªﬁＡ\u3000\xa0\u1100\u1161\u200d🙂\U00013000",
]  # fmt: skip


@cache
def made(kind: str) -> tuple[Tokenizer, text.Tokenizer]:
    """A tokenizer of the library, and ours with pieces of some words."""
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens(ADDED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "PIECE_CHARACTERS", 15)
        patch.setattr(cuts, "MAX_PIECE_BYTES", 1500)
        ours = text.Tokenizer(tokenizer)
        assert ours.cuts is not None  # made with the first use
    return tokenizer, ours


def in_pieces(ours: text.Tokenizer, whole: str) -> tuple[int, list[int], list[tuple[int, int]]]:
    """The number of pieces, the tokens and the offsets."""
    columns: list[list[int]] = [[], [], []]
    pieces = list(ours.cuts.pieces(whole))
    for start, stop in pieces:
        encoded = ours.encode_piece(whole, start, stop, offsets=True)
        assert encoded[:1] == ours.encode_piece(whole, start, stop, offsets=False)
        for column, part in zip(columns, encoded, strict=True):
            column.extend(part)
    ids, starts, stops = columns
    return len(pieces), ids, list(zip(starts, stops, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@example(parts=["words; "] * 20)
@example(parts=["the bold face "] * 20)
@example(parts=["a=\u0338 "] * 30)
@example(parts=["\u09b9\u09df, "] * 20)
@given(parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=60))
def test_pieces_have_the_tokens_of_the_whole_text(kind: str, parts: list[str]) -> None:
    tokenizer, ours = made(kind)
    for whole in ("".join(parts), " ".join(parts)):
        try:
            count, ids, offsets = in_pieces(ours, whole)
        except InvalidRequest:
            continue
        note(f"{count} pieces")
        expected = tokenizer.encode(whole, add_special_tokens=False)
        assert (ids, offsets) == (expected.ids, expected.offsets)


@pytest.mark.parametrize("kind", KINDS)
def test_prose_is_cut_unless_tokens_cross_words(kind: str) -> None:
    tokenizer, ours = made(kind)
    count, ids, _ = in_pieces(ours, PROSE)
    assert ids == tokenizer.encode(PROSE, add_special_tokens=False).ids
    assert (count > 5) == (kind not in UNCUT)


def test_a_long_text_without_words_is_refused_and_the_limit_is_named() -> None:
    _, ours = made("llama 3")
    assert in_pieces(ours, "🙂" * 375)[0] == 1
    with pytest.raises(InvalidRequest, match="a space or a punctuation mark after a word in every 1500 bytes"):
        in_pieces(ours, PROSE + "🙂" * 376)
