"""Stop strings are found anywhere, and the result does not depend on how the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from text_generation_router.text.stop import StopMatcher

LONG = "x" * 5000 + "y"


def feed(pieces: list[str], stops: tuple[str, ...], *, keep: bool = True) -> tuple[str, bool]:
    """Return the text and True if a stop string ended it."""
    matcher = StopMatcher(stops, keep=keep)
    text = ""
    for piece in pieces:
        text += matcher.feed(piece)
        if matcher.matched is not None:
            return text, True
    return text + matcher.flush(), False


@pytest.mark.parametrize(
    ("pieces", "stop", "text"), [(["a", *LONG, "z"], LONG, "a" + LONG), (["one", "two"], "", "one")]
)
def test_a_long_or_empty_stop_ends_the_text(pieces: list[str], stop: str, text: str) -> None:
    assert feed(pieces, (stop,)) == (text, True)


@pytest.mark.parametrize("keep", [True, False])
@given(
    text=st.text("abc", max_size=60),
    stops=st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=4).map(tuple),
    cuts=st.lists(st.integers(0, 60), max_size=12),
)
@example(text="abab", stops=("bab", "ba"), cuts=[2])
@example(text="aaab", stops=("aab",), cuts=[2])
def test_every_split_of_a_text_gives_the_same(keep: bool, text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges) if b > a]
    # The first stop to complete, the longest of several.
    end = min(((text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text), default=None)
    expected = (text, False) if end is None else (text[: end[0] if keep else sum(end)], True)
    assert feed(pieces, stops, keep=keep) == expected


def test_the_longest_of_stops_that_complete_together_is_cut() -> None:
    matcher = StopMatcher(("b", "ab"), keep=False)
    assert (matcher.feed("xab"), matcher.matched) == ("x", "ab")


@given(text=st.text("ab", max_size=40), stops=st.lists(st.text("ab", min_size=1, max_size=8), min_size=1).map(tuple))
@example(text="aaab", stops=("aab",))
@example(text="abababb", stops=("ababb",))
def test_exactly_the_longest_prefix_of_a_stop_is_held(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops, keep=False)
    released = ""
    for end, character in enumerate(text, 1):
        released += matcher.feed(character)
        if matcher.matched is not None:
            return
        so_far = text[:end]
        held = max((n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n])), default=0)
        assert released == so_far[: end - held]
