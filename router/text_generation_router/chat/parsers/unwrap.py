"""Arguments that a model wrote as a JSON string: `"{\\"a\\": 1}"` stands for `{"a": 1}`."""

from __future__ import annotations

import json

from text_generation_router.chat.parsers.scan import SPACE, ObjectScanner, escaped


class Unwrapper:
    """Decodes the inside of a JSON string, piece by piece, as long as it is the text of one JSON object."""

    def __init__(self) -> None:
        self._inner = ObjectScanner()
        self._escape = ""
        self._blank = True

    @property
    def unsaid(self) -> str:
        """What was read of the string, as written, and not given back: its quote, an escape that is not whole."""
        return ('"' if self._inner.depth == 0 and not self._inner.closed else "") + self._escape

    @property
    def whole(self) -> bool:
        """An object was read to its end."""
        return self._inner.closed

    @property
    def may_end(self) -> bool:
        """The string may end here: after an object, or empty."""
        return self._blank or self._inner.closed

    def push(self, char: str) -> str | None:
        """What one more character of the string adds to the object; None: the text is no object."""
        if not self._escape and char != "\\":
            return self._through(char)
        written = self._escape + char
        if len(written) == 1 or (written[1] == "u" and len(written) < 6):
            self._escape = written
            return ""
        decoded = str(json.loads(f'"{written}"'))
        # Half of a surrogate pair is no text; in the object's own strings the same escape says the same.
        said = self._through(written if "\ud800" <= decoded <= "\udfff" else decoded)
        if said is not None:
            self._escape = ""
        return said

    def _through(self, text: str) -> str | None:
        said = []
        for char in text:
            if not self._inner.push(char):
                return None
            self._blank = self._blank and char in SPACE
            if self._inner.in_string:
                said.append(escaped(char))
            elif self._inner.depth or char not in SPACE:
                said.append(char)
        return "".join(said)
