"""The tokenizer of grammars equals that of the library `tokenizers`, also where ids are unused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import write_tokenizer
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from text_generation_common.grammar_tokenizer import end_tokens, load_tokenizer
from text_generation_common.panics import without_backtrace

SMALL = Path(__file__).parents[2] / "corpus" / "tokenizers"
TEXT = 'true "ab": Größe \U0001f600 {"a": 1}'
END_OF_ALL = "<|far|>"


def shifted(folder: Path) -> str:
    """The byte tokenizer with unused ids, control tokens at the end, and one that is not in the vocabulary."""
    write_tokenizer(folder)
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    document["model"]["vocab"] = {
        name: {"<|end|>": 5000, "<|other|>": 6000}.get(name, 2 * token_id) for name, token_id in vocabulary.items()
    }
    document["added_tokens"].append(document["added_tokens"][0] | {"id": 9000, "content": END_OF_ALL})
    return json.dumps(document)


@pytest.fixture(params=["bytes", "deepseek-v3", "gpt-oss", "qwen3"])
def text(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "bytes":
        return shifted(tmp_path)
    return (SMALL / request.param / "tokenizer.json").read_text(encoding="utf-8")


def allowed(grammar: str, tokenizer: LLTokenizer) -> set[int]:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.get_error()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_tokens_above_unused_ids_are_known_and_unused_ids_are_never_allowed(text: str) -> None:
    expected = Tokenizer.from_str(text)
    ids = expected.get_vocab(with_added_tokens=True)
    special = {name for name in ids if name.startswith("<|") and name.endswith("|>")}
    last = max(special, key=lambda name: ids[name])
    tokenizer = load_tokenizer(text, [ids[last], max(ids.values()) + 7])

    assert tokenizer.vocab_size == max(ids.values()) + 1 > len(ids)
    assert end_tokens(tokenizer) == [ids[last]]
    assert tokenizer.tokenize_str(TEXT) == expected.encode(TEXT, add_special_tokens=False).ids
    # Every token of one ASCII letter or more, and no other.
    letters = {token_id for name, token_id in ids.items() if name.isascii() and name.isalpha()}
    assert allowed(LLMatcher.grammar_from_regex("[a-zA-Z]+"), tokenizer) == letters
    assert allowed(LLMatcher.grammar_from_regex(r"(?s:.+)"), tokenizer) <= set(ids.values())
    for name in sorted(special - {last}):
        assert allowed(LLMatcher.grammar_from_lark(f'start: {name} "a"'), tokenizer) == {ids[name]}


def test_a_tokenizer_that_names_an_id_like_an_unused_one_is_read() -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<[0]>", 0.0], ["a", -1.0]]}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}  # alone, llguidance 0.7 refuses it
    document = {"model": model, "added_tokens": [], "decoder": decoder}
    assert load_tokenizer(json.dumps(document)).vocab_size == 2


def test_an_id_beyond_every_vocabulary_is_refused(tmp_path: Path) -> None:
    document = json.loads(shifted(tmp_path))
    document["model"]["vocab"]["<|end|>"] = 2**31
    with pytest.raises(ValueError, match="the token id 2147483648, the limit is 4194303"):
        load_tokenizer(json.dumps(document))


def test_the_message_of_a_panic_has_no_backtrace() -> None:
    assert without_backtrace("panic: index 5\n<backtrace>\n 0: <unknown>\n</backtrace>") == "panic: index 5"
