"""The text of tool calls as models write them, in pieces, for grammars that allow nothing else."""

from dataclasses import dataclass
from enum import Enum, auto


class Slot(Enum):
    """A piece that depends on the tool, or a small fixed one."""

    NAME = auto()
    """The name of the tool."""
    ARGUMENTS = auto()
    """The arguments as a JSON object."""
    PYTHON_ARGUMENTS = auto()
    """The arguments as those of a Python call."""
    KEY = auto()
    """The name of an argument."""
    GAP = auto()
    """Up to two newlines."""


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to `end`, and `end` itself. The special tokens `inside` may occur in it."""

    end: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text that an expression matches."""

    expression: str


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": …, "arguments": {…}}`, with another key for the arguments."""

    arguments: str = "arguments"


@dataclass(frozen=True, slots=True)
class Repeat:
    """Pieces that may occur any number of times."""

    pieces: "tuple[Piece, ...]"


Piece = str | Slot | Until | Pattern | JsonCall | Repeat
Pieces = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """One way to write calls: in blocks of `before`, one or several calls, and `after`."""

    call: Pieces
    before: Pieces = ()
    between: Pieces | None = None
    """Between two calls of a block; None: a block has one."""
    after: Pieces = ()
    blocks: bool = False
    """Several blocks may follow each other."""
