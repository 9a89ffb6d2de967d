"""Parsers around that of a format: for `<think>…</think>` in front of the answer, and for the first call alone."""

from collections.abc import Callable, Sequence
from typing import Final

from text_generation_router.chat.events import Event, Kind, OutputParser
from text_generation_router.chat.parsers.base import Markers

THINK: Final = "<think>"
END_THINK: Final = "</think>"


class ReasoningParser:
    """Passes on the text between the markers as reasoning, and the text after them to the inner parser.

    If the answer does not start with the start marker, all of it goes to the inner parser, unless the prompt already ends
    with the marker (`starts_inside`): then the answer starts in the reasoning and may repeat the marker.
    Dropped are whitespace before the start marker; newlines, no other whitespace, right after it (or at the start of the
    answer if the prompt has it); and newlines right before and after the end marker. Without an end marker nothing is
    dropped at the end. A marker that starts the calls of the inner parser's format may end the reasoning too.
    """

    def __init__(
        self, inner: OutputParser, *, start: str = THINK, end: str = END_THINK, starts_inside: bool = False
    ) -> None:
        self._inner = inner
        self._start = start
        self._end = end
        self._ends = Markers((end, *getattr(inner, "ENDS_OF_REASONING", ())))
        self.markers = inner.markers | {start, end}
        self._starts_inside = starts_inside
        self._rest = ""
        """The end of the last piece, which may be the start of a marker."""
        self._blanks: list[str] = []
        """Whitespace at the start of the answer."""
        self._newlines = 0
        """Newlines at the end of the reasoning so far, held back."""
        self._has_reasoning = False
        self._answering = False
        self._phase: Callable[[str], list[Event]] = self._before

    def feed(self, text: str) -> Sequence[Event]:
        if self._answering:
            return self._inner.feed(text)
        if self._rest:
            text = self._rest + text
            self._rest = ""
        return self._phase(text) if text else ()

    def finish(self) -> Sequence[Event]:
        events: list[Event] = []
        if self._phase == self._before:
            events += self._no_start("")
        if self._phase == self._inside:
            newlines = "\n" * self._newlines if self._has_reasoning else ""
            if newlines or self._rest:
                events.append(Event(Kind.REASONING, newlines + self._rest))
        return [*events, *self._inner.finish()]

    def _before(self, text: str) -> list[Event]:
        stripped = text.lstrip()
        self._blanks.append(text[: len(text) - len(stripped)])
        if stripped.startswith(self._start):
            self._phase = self._inside
            return self._inside(stripped[len(self._start) :])
        if self._start.startswith(stripped):
            self._rest = stripped
            return []
        return self._no_start(stripped)

    def _no_start(self, text: str) -> list[Event]:
        text = "".join(self._blanks) + self._rest + text
        self._rest = ""
        self._phase = self._inside if self._starts_inside else self._answer
        return self._phase(text)

    def _inside(self, text: str) -> list[Event]:
        start, end = self._ends.find(text, 0)
        events = self._reason(text[:start])
        if start == end:
            self._rest = text[start:]
            return events
        if text[start:end] != self._end:
            self._phase = self._answer
            return events + self._answer(text[start:])
        self._phase = self._after
        return events + self._after(text[end:])

    def _reason(self, text: str) -> list[Event]:
        if not self._has_reasoning:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        before, newlines = self._newlines, len(text) - len(body)
        if not body:
            self._newlines += newlines
            return []
        self._newlines = newlines
        self._has_reasoning = True
        return [Event(Kind.REASONING, "\n" * before + body)]

    def _after(self, text: str) -> list[Event]:
        text = text.lstrip("\n")
        if not text:
            return []
        self._phase = self._answer
        return self._answer(text)

    def _answer(self, text: str) -> list[Event]:
        self._answering = True
        return list(self._inner.feed(text)) if text else []


class FirstCall:
    """Drops all but the first tool call of `inner`."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner
        self.markers = inner.markers

    def feed(self, text: str) -> Sequence[Event]:
        return [event for event in self._inner.feed(text) if not event.call]

    def finish(self) -> Sequence[Event]:
        return [event for event in self._inner.finish() if not event.call]
