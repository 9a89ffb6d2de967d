"""TGI's words for a grammar that cannot be used (its rules 17 to 19)."""

from __future__ import annotations

from text_generation_router.errors import InvalidRequest

_LONGEST_DETAIL = 300


def not_supported() -> InvalidRequest:
    """Rule 17: a value that is no grammar, or a server that takes none."""
    return InvalidRequest("grammar is not supported")


def not_valid(detail: str) -> InvalidRequest:
    """Rule 18: the grammar breaks the rules of its own language."""
    return InvalidRequest(f"grammar is not valid: {one_line(detail)}")


def not_compilable(detail: str) -> InvalidRequest:
    """Rule 19: a valid grammar that is beyond what is enforced here. The words are those of TGI's way to compile."""
    return InvalidRequest(f"cannot compile regex from schema: {one_line(detail)}")


def one_line(detail: str) -> str:
    """`detail` on one line, cut to a length fit for a reply."""
    text = " ".join(detail[: 4 * _LONGEST_DETAIL].split())
    return text if len(text) <= _LONGEST_DETAIL else text[:_LONGEST_DETAIL] + "…"
