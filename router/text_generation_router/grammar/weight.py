"""How large a schema is, found by a walk that ends early. Nothing else may touch a client's JSON before this did."""

from __future__ import annotations

from text_generation_router.grammar.refusals import not_compilable

MAX_TEXT = 256 * 1024
"""Characters of a grammar, whatever its kind."""
MAX_NODES = 8_000
"""Values in a schema: objects, arrays and all they hold."""
MAX_DEPTH = 64
"""Objects and arrays inside each other; the JSON reader of the engine ends at 128."""


def check_weight(value: object) -> None:
    """Refuse a value too large to look at. Takes a few milliseconds at most. Raises InvalidRequest."""
    nodes, characters = 0, 0
    level: list[object] = [value]
    depth = 0
    while level:
        below: list[object] = []
        for item in level:
            nodes += 1
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, dict):
                characters += sum(map(len, item))
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            if nodes + len(below) > MAX_NODES:
                raise not_compilable(f"the schema has more than {MAX_NODES} values")
        if characters > MAX_TEXT:
            raise not_compilable(f"the schema is longer than {MAX_TEXT} characters")
        level = below
        depth += 1
        if level and depth > MAX_DEPTH:
            raise not_compilable(f"the schema is nested more than {MAX_DEPTH} levels deep")


def check_length(text: str) -> None:
    """Refuse a text too long to look at. Raises InvalidRequest."""
    if len(text) > MAX_TEXT:
        raise not_compilable(f"the grammar is longer than {MAX_TEXT} characters")
