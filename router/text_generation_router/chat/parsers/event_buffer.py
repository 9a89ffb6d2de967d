"""The events that a parser has found: adjacent ones of a kind are joined, calls are numbered, blanks are held back."""

from text_generation_router.chat.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart


class EventBuffer:
    """The events of one answer. Whitespace alone before, between or after calls is not text."""

    def __init__(self) -> None:
        self.calls = 0
        self.has_arguments = False
        """The last call has arguments."""
        self._events: list[Event] = []
        self._parts: list[str] = []
        self._kind: type[Event] = TextDelta
        """The kind of event that the parts make."""
        self._blanks: list[str] = []
        """Whitespace since the last call or the start: text if more text follows, or if there are no calls."""
        self._in_text = False

    def text(self, text: str) -> None:
        """Add text of the answer; may be empty."""
        if self._in_text or not text:
            self._add(text, TextDelta)
        elif text.isspace():
            self._blanks.append(text)
        else:
            self._in_text = True
            self._add("".join(self._blanks) + text, TextDelta)
            self._blanks.clear()

    def reason(self, text: str) -> None:
        """Add reasoning; may be empty."""
        self._in_text = False
        self._add(text, ReasoningDelta)

    def start(self, name: str) -> None:
        """Start the next call."""
        self._blanks.clear()
        self._in_text = False
        self._flush()
        self._events.append(ToolCallStart(self.calls, name))
        self.calls += 1
        self.has_arguments = False

    def arguments(self, fragment: str) -> None:
        """Add to the arguments of the last call; may be empty. Needs a call with no text after it."""
        if fragment:
            self.has_arguments = True
            self._add(fragment, ToolCallArguments)

    def drop_blanks(self) -> None:
        """Drop the whitespace since the last call: it belongs to the markers of the call."""
        if not self._in_text:
            self._blanks.clear()

    def finish(self) -> None:
        if not self.calls:
            self._add("".join(self._blanks), TextDelta)
        self._blanks.clear()

    def drain(self) -> list[Event]:
        """Return the events since the last `drain`."""
        if self._parts:
            self._flush()
        events = self._events
        if events:
            self._events = []
        return events

    def _add(self, text: str, kind: type[Event]) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if not self._parts:
            return
        joined = "".join(self._parts)
        self._parts.clear()
        if self._kind is ToolCallArguments:
            self._events.append(ToolCallArguments(self.calls - 1, joined))
        else:
            self._events.append(ReasoningDelta(joined) if self._kind is ReasoningDelta else TextDelta(joined))
