"""How grammars are compiled. The shard compiles with the same ones; else what is proven here is not what runs there."""

from __future__ import annotations

from typing import Final, TypedDict


class JsonOptions(TypedDict):
    """The part of llguidance's JsonCompileOptions that is set here."""

    whitespace_flexible: bool
    item_separator: str
    key_separator: str
    coerce_one_of: bool
    lenient: bool


class ParserLimits(TypedDict):
    """The part of llguidance's LLParserLimits that is set here."""

    initial_lexer_fuel: int
    max_grammar_size: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    verbose_errors: bool


JSON_OPTIONS: Final[JsonOptions] = {
    # One line, as json.dumps writes it. A model that may write blanks where it likes can write them for ever.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # `oneOf` only where its schemas exclude each other.
    "coerce_one_of": False,
    "lenient": False,
}

LIMITS: Final[ParserLimits] = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "verbose_errors": False,
}
