"""The byte offsets of the tokens of /tokenize."""

from __future__ import annotations

from itertools import chain

import pytest

from text_generation_router.api.core.tokens import simple_tokens
from text_generation_router.text.tokenizer import Encoding


def test_offsets_count_bytes() -> None:
    encoding = Encoding([1, 5, 6, 7], [0, 0, 2, 4], [0, 2, 4, 5])
    assert [*chain.from_iterable(simple_tokens("aé漢😀b", encoding))] == [
        {"id": 1, "text": "", "start": 0, "stop": 0},
        {"id": 5, "text": "aé", "start": 0, "stop": 3},
        {"id": 6, "text": "漢😀", "start": 3, "stop": 10},
        {"id": 7, "text": "b", "start": 10, "stop": 11},
    ]


@pytest.mark.parametrize("offsets", [[(0, 1), (0, 1), (1, 2)], [(1, 2), (0, 1), (1, 2)]])
def test_tokens_that_share_or_swap_characters_have_their_own_offsets(offsets: list[tuple[int, int]]) -> None:
    tokens = chain.from_iterable(simple_tokens("漢字", Encoding([1, 2, 3], *zip(*offsets, strict=True))))
    assert [(token["start"], token["stop"]) for token in tokens] == [(3 * a, 3 * b) for a, b in offsets]
