"""Made-up log-probabilities, of the shapes that the library gives."""

from __future__ import annotations

from typing import Any

from trtllm_standin.responses import Logprob, TokenLogprobs

BEST = -0.5
"""Of the token that the prompt would have next; its neighbours in the vocabulary follow, each less by STEP."""
STEP = 0.7


def of_token(token: int, expected: int, wanted: int, vocab_size: int) -> dict[int, Logprob]:
    """One position: the `wanted` most probable tokens, and the chosen one.

    It stands first in the dictionary, and is there even where it is not among them, with a rank after theirs
    (_torch/pyexecutor/sampler/logprobs.py on main; at 1.2.1 so by the neighbouring sources): then there are wanted + 1.
    """
    ranks = {(expected + place) % vocab_size: place for place in range(wanted)}
    # Unlikely as a token may be that was drawn, it is less likely than all that were asked for.
    place = ranks.pop(token, 0 if token == expected else max(wanted, 1))
    return {token: _entry(place)} | {other: _entry(rank) for other, rank in ranks.items()}


def of_token_alone(token: int, expected: int) -> float:
    """The same as a plain number: logprobs_simple_format."""
    return BEST if token == expected else BEST - STEP


def of_prompt(
    prompt: list[int], first: int, following: int, wanted: int, vocab_size: int, *, always_own: bool
) -> TokenLogprobs:
    """Rows for the prompt's positions from `first`: row t tells of the token after position t, the last of `following`.

    So there is no row for the prompt's first token, and one that tells of a generated one (result.py at 1.2.1, and the
    tests of logprobs on main). A token that repeats the one before it is taken for a surprise, not among the most
    probable: its own entry is then missing, unless `always_own`.
    """
    rows: TokenLogprobs = []
    for position in range(first, len(prompt)):
        token = prompt[position + 1] if position + 1 < len(prompt) else following
        expected = token if token != prompt[position] else (token + 1) % vocab_size
        row = of_token(token, expected, wanted, vocab_size)
        if token != expected and not always_own:
            del row[token]
        rows.append(row)
    return rows


def total(entries: list[Any], tokens: list[int]) -> float:
    """The sum over tokens of what their entries say of them."""
    return sum(
        entry if isinstance(entry, float) else entry[token].logprob
        for entry, token in zip(entries, tokens, strict=True)
    )


def _entry(place: int) -> Logprob:
    return Logprob(BEST - STEP * place, place + 1)
