"""Options with which router and shard compile grammars. They must agree: the router's proof holds for what the shard runs."""

from typing import Final

MAX_GRAMMAR_TEXT: Final = 256 << 10
"""Characters of a grammar. Compile time grows with the square of its patterns: at worst such a text takes 2 s."""


JUDGE_STACK_BYTES: Final = 4 << 20
"""Stack of the proof. llguidance's compiler takes about 3.5 kB of it for each rule inside another one."""
STACK_BYTES: Final = 4 * JUDGE_STACK_BYTES
"""Stack of a shard's threads: a grammar that passed the proof does not exhaust it. Only used pages take memory."""


JSON_OPTIONS: Final[dict[str, bool | str]] = {
    # One line, as json.dumps writes it, the form that models have seen most of. With free white space a model that is
    # not sure writes nothing else until it runs out of tokens.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # `oneOf` only where its schemas exclude each other: as `anyOf` it would allow texts that satisfy two of them.
    "coerce_one_of": False,
    # A keyword that is not supported is refused, not ignored.
    "lenient": False,
}
"""The part of llguidance's JsonCompileOptions that is set here."""
LIMITS: Final[dict[str, int | bool]] = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 500_000,
    # These three bound the cost of a step and the memory of a sequence: a lexer state takes 1 to 2 kB.
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
"""The part of llguidance's LLParserLimits that is set here."""
