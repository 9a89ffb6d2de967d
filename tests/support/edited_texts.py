"""Texts of about 400 tokens, each edited twice in one conversation."""

from __future__ import annotations

from collections.abc import Sequence

CODE = '''class Stack:
    """A stack of values."""

    def __init__(self, limit):
        self.limit = limit
        self.values = []

    def push(self, value):
        if len(self.values) >= self.limit:
            raise OverflowError("the stack is full")
        self.values.append(value)
        return value

    def pop(self):
        if not self.values:
            raise IndexError("the stack is empty")
        return self.values.pop()

    def peek(self):
        if not self.values:
            raise IndexError("the stack is empty")
        return self.values[-1]

    def clear(self):
        self.values = []

    def copy(self):
        other = Stack(self.limit)
        for value in self.values:
            other.push(value)
        return other

    def reverse(self):
        other = Stack(self.limit)
        for value in reversed(self.values):
            other.push(value)
        return other

    def size(self):
        return len(self.values)

    def is_empty(self):
        return len(self.values) == 0

    def is_full(self):
        return len(self.values) >= self.limit

    def total(self):
        result = 0
        for value in self.values:
            result = result + value
        return result'''
PROSE = """The lighthouse stands on the last rock of the coast. Every evening the keeper climbs the stairs, cleans the lamp and \
lights it before the sun is gone. The ships that pass at night look for its light and turn to the north when they see it. In \
the winter the storms are so strong that no boat can reach the rock for many weeks, and the keeper lives from what he has \
stored in the autumn. He writes the weather of each day into a book: the wind, the height of the waves, the clouds and the \
birds that he has seen. When the spring comes, his sister sails out to him with bread, letters and news from the village. \
They sit on the stones below the tower, drink tea and talk about the people at home. Then she reads his book, and she copies \
the days of the storms for the school, where the children draw them on a large map. The oldest book on the shelf is more than \
a hundred years old, and the first page of it says that the light must never go out. One day a young engineer came to the rock \
with a machine that could light the lamp without a keeper. He worked for a week, and when he was done, the lamp turned by \
itself and the stairs were silent. The keeper looked at the machine, closed his book and took the boat to the village. But \
in the first storm of the autumn the machine stopped, and it was the keeper who rowed out in the night to light the lamp again."""
RECORDS = "\n".join(
    f"{number}. {name} | {city} | {amount} EUR | order {1000 + 7 * number} | status: open"
    for number, (name, city, amount) in enumerate(
        zip(
            [
                "Anna",
                "Bruno",
                "Clara",
                "David",
                "Elena",
                "Felix",
                "Greta",
                "Henri",
                "Irene",
                "Jonas",
                "Karla",
                "Leon",
                "Maria",
                "Nils",
                "Olga",
            ],
            [
                "Berlin",
                "Hamburg",
                "Munich",
                "Cologne",
                "Leipzig",
                "Dresden",
                "Bremen",
                "Essen",
                "Kassel",
                "Mainz",
                "Trier",
                "Ulm",
                "Jena",
                "Kiel",
                "Bonn",
            ],
            (12, 85, 40, 33, 71, 56, 98, 24, 67, 19, 45, 82, 38, 61, 77),
            strict=True,
        ),
        1,
    )
)
EDITS = [
    (CODE, ("value", "item"), ("limit", "size_limit")),
    (PROSE, ("keeper", "guard"), ("village", "town")),
    (RECORDS, ("open", "paid"), ("EUR", "USD")),
]
"""A text, and two edits, each of which replaces a word."""


def conversation(turns: Sequence[tuple[str, str]]) -> str:
    """Return turns of (role, text) in the chat format of the demo model, up to the answer of the assistant."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def second_edits() -> list[tuple[str, str]]:
    """Return the prompt for the second edit of each text, and what the answer should be."""
    pairs: list[tuple[str, str]] = []
    for text, first, second in EDITS:
        once = text.replace(*first)
        asked = "Write the text again, with `{}` instead of `{}`."
        turns = [
            ("user", f"{asked.format(first[1], first[0])}\n\n{text}"),
            ("assistant", once),
            ("user", asked.format(second[1], second[0])),
        ]
        pairs.append((conversation(turns), once.replace(*second)))
    return pairs
