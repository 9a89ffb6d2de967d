"""Fixed texts found in a stream, however it is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Markers:
    """Finds the first of several texts, and where one may have begun at the end of what is there."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = tuple(texts)
        # An alternation of plain texts: nothing in it can backtrack. Without texts it never matches.
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, at: int) -> tuple[int, int]:
        """Start and end of the first marker from `at` on.

        Without one, both are where a marker may have begun, or the end of the text: what lies before is certain.
        """
        found = self._pattern.search(text, at)
        if found is not None:
            return found.span()
        for start in range(max(at, len(text) - self._longest), len(text)):
            if text[start:] in self._beginnings:
                return start, start
        return len(text), len(text)
