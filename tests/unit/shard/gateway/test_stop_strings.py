"""StopStringFinder against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from text_generation_shard.gateway.stop_strings import StopStringFinder


def feed_all(pieces: list[str], stops: list[str], *, keep: bool) -> tuple[list[int], StopStringFinder]:
    """Return the number of sendable tokens after each token, up to the first match. Token i has the text pieces[i]."""
    finder = StopStringFinder(stops, pieces.__getitem__, keep=keep)
    sendable: list[int] = []
    for token in range(len(pieces)):
        finder.feed(token)
        sendable.append(finder.sendable)
        if finder.matched is not None:
            break
    return sendable, finder


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Return [start, end) of the match that completes first, the longest of several; None without a match."""
    found = [(at + len(stop), -len(stop)) for stop in stops if (at := text.find(stop)) >= 0]
    return None if not found else (min(found)[0] + min(found)[1], min(found)[0])


pieces = st.lists(st.text("ab", max_size=3), max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


@given(pieces, stops, st.booleans())
def test_sendable_tokens_only_grow_and_the_first_match_ends_the_output(
    pieces: list[str], stops: list[str], keep: bool
) -> None:
    sendable, finder = feed_all(pieces, stops, keep=keep)
    text = "".join(pieces)
    match = first_match(text, stops)
    assert sendable == sorted(sendable)
    if match is None:
        assert finder.matched is None
        return
    start, end = match
    assert finder.matched == text[start:end]
    ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
    last = next(token for token, reached in enumerate(ends) if reached >= end)
    assert len(sendable) == last + 1
    begins = [token for token, reached in enumerate(ends) if pieces[token] and reached - len(pieces[token]) == start]
    if keep or not begins:
        assert finder.sendable == last + 1
    else:
        # Tokens without text belong to the next token with text.
        assert "".join(pieces[: finder.sendable]) == text[:start]


@given(pieces, stops)
def test_a_token_is_held_back_only_while_it_may_be_part_of_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    sendable, finder = feed_all(pieces, stops, keep=True)

    def known(count: int) -> str:
        return "".join(pieces[:count])

    for fed, left in enumerate(sendable[: -1 if finder.matched else None], 1):
        text = known(fed)
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        decoded = max((count for count in range(fed + 1) if len(known(count)) <= len(text) - held), default=0)
        # Everything before the held suffix is sendable, except tokens without text at the border.
        assert len(known(left)) == len(known(decoded))
