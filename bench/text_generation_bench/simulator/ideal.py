"""IdealCache: the prefix hits of a cache that forgets nothing, on one replica, with every block there at once.

Worked out the plain way, by remembering the hash of every prefix of whole blocks, so that it shares nothing with the
tree whose figures it is held against.
"""

from __future__ import annotations


class IdealCache:
    """Counts hits. Fed with requests in order of arrival, and with answers when they are whole."""

    def __init__(self, block_size: int, most_prefixes: int) -> None:
        """`most_prefixes`: with more to remember it gives up, and `hit_rate` is None."""
        self._block_size = block_size
        self._most = most_prefixes
        self._seen: set[int] = set()
        self._prompt_tokens = 0
        self._hit_tokens = 0

    def arrive(self, prompt: tuple[int, ...]) -> None:
        """A request came. One token of a prompt is always left to compute."""
        if len(self._seen) > self._most:
            return
        size = self._block_size
        hit = 0
        prefixes = self._prefixes(prompt)
        for number, prefix in enumerate(prefixes[: (len(prompt) - 1) // size], start=1):
            if prefix not in self._seen:
                break
            hit = number * size
        self._prompt_tokens += len(prompt)
        self._hit_tokens += hit
        self._seen.update(prefixes)

    def answer(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
        """An answer is whole. The KV of its last token was never computed."""
        if len(self._seen) <= self._most:
            self._seen.update(self._prefixes((*prompt, *answer[:-1])))

    def _prefixes(self, tokens: tuple[int, ...]) -> list[int]:
        size = self._block_size
        prefixes = []
        prefix = 0
        for start in range(0, len(tokens) - size + 1, size):
            prefix = hash((prefix, tokens[start : start + size]))
            prefixes.append(prefix)
        return prefixes

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens as a share of prompt tokens; None if it gave up, or nothing came."""
        if len(self._seen) > self._most or not self._prompt_tokens:
            return None
        return self._hit_tokens / self._prompt_tokens
