"""The contents of messages."""

from __future__ import annotations

import time

from text_generation_router.chat.conversation import image_part, join_parts, text_part


def test_texts_that_follow_each_other_are_joined() -> None:
    assert join_parts([]) == ""
    assert join_parts(["a", text_part("b"), "c"], "-") == "a-b-c"
    assert join_parts(["a", "b", image_part("u"), image_part("v"), "c"]) == [
        text_part("ab"),
        image_part("u"),
        image_part("v"),
        text_part("c"),
    ]


def test_the_time_for_many_parts_grows_with_their_length() -> None:
    began = time.process_time()
    assert len(join_parts(["a" * 1000] * 10_000)) == 10_000_000
    assert time.process_time() - began < 1
