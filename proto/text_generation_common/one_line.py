"""Messages of errors in one line: for logs, replies and exit messages."""

MAX_LINE = 300
"""Characters that are kept of a message."""


def one_line(message: object, most: int = MAX_LINE) -> str:
    """Return a message in one line, cut after `most` characters; of an error without a message its type."""
    text = " ".join(str(message)[: 4 * most].split())
    if not text and isinstance(message, BaseException):
        return type(message).__name__
    return text if len(text) <= most else f"{text[:most]}…"


def typed_line(error: BaseException, most: int = MAX_LINE) -> str:
    """Return the type and the message of an error in one line."""
    return one_line(f"{type(error).__name__}: {error}", most)
