"""Make a small tokenizer.json from that of a model: the tokens of some texts, with their ids, and all special tokens.

python tests/support/small_tokenizer.py NAME TOKENIZER.JSON writes tests/corpus/tokenizers/NAME/tokenizer.json, for the
answers of `model_answers`, which it cuts into the same tokens as the whole tokenizer does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model_answers import TABLES
from tokenizers import Tokenizer, pre_tokenizers

FOLDER = Path(__file__).parents[1] / "corpus" / "tokenizers"
FORMATS = {
    "gpt-oss": ("openai",),
    "qwen3": ("qwen3_coder", "hermes+outside"),
    "deepseek-v3": ("deepseek_v3",),
}
"""The formats of the answers that each tokenizer must cut."""

UNUSED = re.compile("reserved|place▁holder")


def texts_of(name: str) -> list[str]:
    return [text for kind in FORMATS[name] for text, _ in TABLES[kind].values()]


def small(whole: dict[str, Any], texts: Iterable[str]) -> dict[str, Any]:
    """Return a byte-level BPE tokenizer with the tokens of `texts`, and those that they are merged from."""
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    vocabulary, merges = whole["model"]["vocab"], whole["model"]["merges"]
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    made_from: dict[str, list[tuple[str, ...]]] = {}
    for pair in pairs:
        made_from.setdefault("".join(pair), []).append(pair)
    kept = set(pre_tokenizers.ByteLevel.alphabet())
    open_tokens = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).tokens]
    while open_tokens:
        token = open_tokens.pop()
        if token in vocabulary and (token not in kept or len(token) > 1):
            kept.add(token)
            open_tokens += [part for pair in made_from.pop(token, ()) for part in pair]
    added = [token for token in whole["added_tokens"] if not UNUSED.search(token["content"])]
    model = whole["model"] | {
        "vocab": {token: number for token, number in vocabulary.items() if token in kept}
        | {token["content"]: token["id"] for token in added},
        "merges": [list(pair) for pair in pairs if kept.issuperset((*pair, "".join(pair)))],
    }
    return whole | {"model": model, "added_tokens": added}


if __name__ == "__main__":
    name, source = sys.argv[1:]
    tokenizer = small(json.loads(Path(source).read_text(encoding="utf-8")), texts_of(name))
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
    written = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (FOLDER / name / "tokenizer.json").write_text(written + "\n", encoding="utf-8")
