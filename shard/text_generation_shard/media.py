"""The images of a prompt, as a request brings them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Media:
    """An image of a prompt. The prompt has the model's own placeholder ids at its positions."""

    offset: int
    """The position in the prompt of its first token."""
    tokens: int
    """Tokens of the prompt that stand for it, with those between its rows."""
    digest: bytes
    """SHA-256 of `data`."""
    data: bytes
    """The file: PNG, JPEG, WebP or GIF (first frame)."""

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.offset + self.tokens


def media_problem(media: Sequence[Media], prompt: int, most: int) -> str | None:
    """Return the first problem of the images of a prompt of so many tokens, of which at most `most` are served; None if there is none."""
    if len(media) > most:
        return f"a prompt has at most {most} images" if most else "the model takes no images"
    at = 0
    for each in media:
        if each.tokens < 1 or each.offset < at or each.end > prompt:
            return "the images of the prompt do not lie in it one after the other"
        at = each.end
    return None
