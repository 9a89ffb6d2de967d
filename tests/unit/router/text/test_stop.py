"""Stop strings are found anywhere, and the result does not depend on how the text is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from text_generation_router.text.stop import StopMatcher


def feed(pieces: list[str], stops: tuple[str, ...], *, keep: bool = True) -> tuple[str, bool]:
    """Return the text and True if a stop string ended it."""
    matcher = StopMatcher(stops, keep=keep)
    text = ""
    for piece in pieces:
        text += matcher.feed(piece)
        if matcher.matched is not None:
            return text, True
    return text + matcher.flush(), False


def test_a_stop_inside_a_token_cuts_the_token() -> None:
    assert feed(["one STOP two"], ("STOP",)) == ("one STOP", True)


def test_a_stop_across_tokens_is_found() -> None:
    assert feed(["one S", "T", "OP two"], ("STOP",)) == ("one STOP", True)


def test_a_stop_longer_than_any_window_is_found() -> None:
    stop = "x" * 5000 + "y"
    assert feed(["a", *stop, "z"], (stop,)) == ("a" + stop, True)


def test_the_stop_that_completes_first_wins() -> None:
    assert feed(["abcdef"], ("cdef", "bc")) == ("abc", True)


def test_an_almost_stop_followed_by_the_stop_is_found() -> None:
    assert feed(["aa", "ab"], ("aab",)) == ("aaab", True)


def test_an_empty_stop_ends_after_the_first_piece() -> None:
    assert feed(["one", "two"], ("",)) == ("one", True)


@given(
    text=st.text("abc", max_size=60),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    cuts=st.lists(st.integers(0, 60), max_size=12),
)
@example(text="abab", stops=("bab", "ba"), cuts=[2])
def test_every_split_of_a_text_gives_the_same(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges) if b > a]
    end = min((text.index(stop) + len(stop) for stop in stops if stop in text), default=None)
    assert feed(pieces, stops) == ((text, False) if end is None else (text[:end], True))


def test_only_a_possible_start_of_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(("STOP", "ende"), keep=False)
    assert [matcher.feed(piece) for piece in ("an S", "T", "ST", "O", "x", "end")] == ["an ", "", "ST", "", "STOx", ""]
    assert matcher.flush() == "end"


def test_the_longest_of_stops_that_complete_together_is_cut() -> None:
    matcher = StopMatcher(("b", "ab"), keep=False)
    assert (matcher.feed("xab"), matcher.matched) == ("x", "ab")


@given(
    text=st.text("ab", max_size=60),
    stops=st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=4).map(tuple),
    cuts=st.lists(st.integers(0, 60), max_size=12),
)
def test_every_split_of_a_cut_text_gives_the_same(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges) if b > a]
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    assert feed(pieces, stops, keep=False) == ((text, False) if not ends else (text[: sum(min(ends))], True))


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
