"""Compilation of grammars by llguidance, and the tokenizer for which it compiles them: the same for router and shard.

llguidance reads a tokenizer.json itself, but it takes the number of tokens for the end of their ids. Where ids are unused,
it lacks the tokens with the largest ids, often the control tokens. Such a tokenizer is read with its tokens numbered
without holes, and then its tokens are handed over with their own ids.

tensorrt_llm pins llguidance 0.7.29, which knows one end token and no `verbose_errors`. Only this module depends on the version.
"""

import re
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import orjson

from text_generation_common.grammar_options import JSON_OPTIONS, LIMITS
from text_generation_common.model_files import MAX_TOKEN_IDS
from text_generation_common.panics import without_panics
from text_generation_proto.values import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

HOLE = re.compile(rb"<\[\d+\]>")
"""The text that llguidance shows for an id without a token."""


@without_panics
def load_tokenizer(text: str, eos_token_ids: Sequence[int] = ()) -> "LLTokenizer":
    """Return the tokenizer of a tokenizer.json; `eos_token_ids` end a text, else the tokenizer's own.

    Raises ValueError or PanicError if it cannot be read.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(text)
    size = tokenizer.vocab_size
    source: str | TokenizerWrapper = text
    tokens = None
    if HOLE.search(tokenizer.decode_bytes(list(range(size)))) and isinstance(
        orjson.loads(text)["model"]["vocab"], dict
    ):
        del tokenizer  # it takes a few hundred bytes for each token
        tokens = _Tokens(text)
        size = len(tokens.tokens)
    # The model's vocabulary, and so its EOS tokens, may be larger than the tokenizer's.
    known = [token_id for token_id in eos_token_ids if token_id < size]
    if tokens is None and not known:
        return tokenizer
    if tokens is not None:
        tokens.eos_token_id = known[0] if known else tokens.eos_token_id
        source = TokenizerWrapper(tokens)
    if not hasattr(LLTokenizer, "eos_tokens"):
        return LLTokenizer(source, eos_token=known[0] if known else None)
    return LLTokenizer(source, eos_token=known or None)


def end_tokens(tokenizer: "LLTokenizer") -> list[int]:
    """Return the tokens that end a text for llguidance."""
    return list(getattr(tokenizer, "eos_tokens", (tokenizer.eos_token,)))


def compiled(grammar: Grammar, tokenizer: "LLTokenizer") -> "LLMatcher":
    """Return a matcher, which may hold an error. Raises ValueError for a schema that is no JSON, and for other kinds."""
    from llguidance import LLMatcher, LLParserLimits

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            text = LLMatcher.grammar_from_json_schema(grammar.text, overrides=cast("JsonCompileOptions", JSON_OPTIONS))
        case GrammarKind.REGEX:
            text = LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            text = LLMatcher.grammar_from_lark(grammar.text)
        case _:
            raise ValueError("the grammar is of no known kind")
    known: dict[str, Any] = {name: value for name, value in LIMITS.items() if hasattr(LLParserLimits, name)}
    return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**known))


class _Tokens:
    """The tokens of a tokenizer.json with unused ids, as llguidance's TokenizerWrapper takes them."""

    def __init__(self, text: str) -> None:
        """Raises ValueError if an id is too large."""
        from llguidance import LLTokenizer

        document = orjson.loads(text)
        names = _names_by_id(document)
        self._ids = sorted(names)
        if (last := max(self._ids)) >= MAX_TOKEN_IDS:
            raise ValueError(f"it has the token id {last}, the limit is {MAX_TOKEN_IDS - 1}")
        document["model"]["vocab"] = {names[token_id]: place for place, token_id in enumerate(self._ids)}
        self._dense = LLTokenizer(orjson.dumps(document).decode())
        self.eos_token_id = self._ids[self._dense.eos_token]
        self.bos_token_id = None
        self.special_token_ids: list[int] = []
        self.tokens = [b""] * (last + 1)
        """The bytes of each id; none for an unused one, which no mask allows."""
        for place, token_id in enumerate(self._ids):
            if self._dense.is_special_token(place):
                self.special_token_ids.append(token_id)
                self.tokens[token_id] = names[token_id].encode()
            else:
                self.tokens[token_id] = self._dense.decode_bytes([place])

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the ids of the tokens of a text."""
        places = self._dense.tokenize_bytes(text) if isinstance(text, bytes) else self._dense.tokenize_str(text)
        return [self._ids[place] for place in places]


def _names_by_id(document: dict[str, Any]) -> dict[int, str]:
    """Return the tokens with the ids that the library `tokenizers` gives them.

    An added token has its id in the vocabulary, or else the next after their count; the id beside it in the file has no meaning.
    """
    vocabulary: dict[str, int] = document["model"]["vocab"]
    contents = dict.fromkeys(token["content"] for token in document.get("added_tokens") or ())
    free = count(len(vocabulary))
    added = {name: vocabulary[name] if name in vocabulary else next(free) for name in contents}
    return {token_id: name for names in (vocabulary, added) for name, token_id in names.items()}
