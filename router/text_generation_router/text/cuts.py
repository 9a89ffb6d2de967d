"""Cuts a long text into pieces whose tokens are those of the whole text.

While the library encodes, it needs some hundred bytes of memory for a token. In pieces a text of any length needs that of
one piece. A cut lies after a letter or digit and before a separator. It changes no token if

* no token crosses it: the pre-tokenizer separates the two characters, or no token of a BPE vocabulary contains them. A BPE
  merge joins two tokens to a token, so none crosses either;
* it is neither in nor beside the text of an added token;
* the rest of the tokenizer sees the second piece, after the character before it, as it sees it in the middle of a text.
  Rules for the beginning of a text, such as a space that is put before it, concern the character before the piece, and its
  tokens are dropped. This is tried with short texts for each separator when the first long text comes.
"""

import re
import string
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice

import tokenizers

from text_generation_router.errors import InvalidRequest

SEPARATORS = sorted({*" \t\n\r", *string.punctuation, *"、。，；：？！"} - {*"'_"})
"""Candidates. An apostrophe or underscore is part of a word for many pre-tokenizers."""
LEFT = ("It's I", "x 1234567", "née", "вот", "中文", "です", "한국", "\U00013000", "বা\U00030000")
RIGHT = ("", "a", "  b 1", "\n\nx", "1234, 7", "文", ".", "'s", "e\u0301", "\t \n", "🙂", "\U00013000")
"""Texts before a cut, and after its separator."""
PIECE_CHARACTERS = 4000
"""Length after which a text is cut at the next place: a millisecond or two of work, the cheapest length. Of a text that comes
again, the last piece is encoded again."""
MAX_PIECE_BYTES = 1 << 17
"""Bytes of a piece, in a text without a place for a cut. A token is at least a byte: tens of megabytes."""
MAX_TRIES = 64
"""Places that are looked at for a cut."""
NEAR = 3
"""Characters beside a cut that are normalized together."""


def crossed_by(tokens: Iterable[str]) -> set[str]:
    """Return the pairs of a character and a separator inside `tokens`, in which `▁` is a space."""
    return set(re.findall(f"(?=([^\\0]{_one_of(SEPARATORS)}))", "\0".join(tokens).replace("▁", " ")))


def _one_of(characters: Iterable[str]) -> str:
    return f"[{''.join(map(re.escape, characters))}]"


class Cuts:
    """The places at which texts may be cut for one tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, crossed: Set[str] | None, *, scale: float = 1) -> None:
        """`crossed`: `crossed_by` a BPE vocabulary of characters. With None, for other vocabularies, texts are cut only where
        the pre-tokenizer separates. `scale` times the usual length is that of pieces."""
        self._piece, self._most = int(scale * PIECE_CHARACTERS), int(scale * MAX_PIECE_BYTES)
        self._tokenizer = tokenizer
        usable = [
            mark for mark in SEPARATORS if (crossed is not None or self._is_split(mark)) and self._is_neutral(mark)
        ]
        self._separators = frozenset(usable)
        self._crossed = set(crossed or ())
        for token in tokenizer.get_added_tokens_decoder().values():
            for text in {token.content, self._normalized(token.content)}:
                self._crossed |= crossed_by([text])
                self._crossed.update(text[-1:] + mark for mark in usable)
        self._place = re.compile(f"[^\\W_](?={_one_of(usable)})" if usable else "(?!)")

    def pieces(self, text: str) -> Iterator[tuple[int, int]]:
        """Return the first character of each piece and that after it. Raises InvalidRequest if a piece is too long."""
        start = 0
        while start < len(text):
            places = self._place.finditer(text, start + self._piece, start + self._most)
            ends = (place.end() for place in islice(places, MAX_TRIES))
            stop = next((end for end in ends if self._is_cut(text, end)), len(text))
            if 4 * (stop - start) > self._most and len(text[start:stop].encode()) > self._most:
                raise InvalidRequest(
                    f"a text must have a space or a punctuation mark after a word in every {self._most} bytes"
                )
            yield start, stop
            start = stop

    def _is_cut(self, text: str, at: int) -> bool:
        """Return True if no token crosses a place that the expression found."""
        left, both = self._normalized(text[at - NEAR : at]), self._normalized(text[at - NEAR : at + NEAR])
        pair = both[len(left) - 1 : len(left) + 1].replace("▁", " ")
        # The normalizer may turn a letter into one with a mark after it, and a number into "(1)".
        is_word = pair[:1].isalpha() or pair[:1].isdecimal()
        return both.startswith(left) and is_word and pair[1:] in self._separators and pair not in self._crossed

    def _is_neutral(self, mark: str) -> bool:
        """Return True if texts with a cut before `mark` have the same tokens as whole."""
        rights = [mark + right for right in RIGHT]
        for left in LEFT:
            wholes = self._tokens([left, *(left + right for right in rights)])
            parts = self._tokens([left[-1], *(left[-1] + right for right in rights)], at=len(left) - 1)
            first, before = next(wholes), next(parts)
            if any(whole != first + part[len(before) :] for whole, part in zip(wholes, parts, strict=True)):
                return False
        return True

    def _is_split(self, mark: str) -> bool:
        """Return True if the pre-tokenizer separates letters and digits from `mark`."""
        if (pre_tokenizer := self._tokenizer.pre_tokenizer) is None:
            return False
        for left in LEFT:
            at = len(self._normalized(left))
            parts = pre_tokenizer.pre_tokenize_str(self._normalized(left + mark + "a"))
            if any(start < at < stop for _, (start, stop) in parts):
                return False
        return True

    def _tokens(self, texts: Sequence[str], at: int = 0) -> Iterator[list[tuple[int, int, int]]]:
        """Yield the tokens of each text with their offsets, for texts that begin `at` a character."""
        for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            yield [(token, at + a, at + b) for token, (a, b) in zip(encoding.ids, encoding.offsets, strict=True)]

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)
