"""Prompts: token ids, words, texts of exact length by a tokenizer, or the records of a dataset file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from text_generation_bench.load.dialects import Prompt
from text_generation_bench.load.settings import LoadSettings, fail

FIRST_ID = 200
"""Token ids below it may be special."""
COMMON_WORDS = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these would "
    "other into has more her two like him see time could no make than first been its who now people my made over did down "
    "only way find use may water long little very after words called just where most know get through back much before go "
    "good new write our used me man too any day same right look think also around another came come work three word must "
    "because does part even place well such here take why things help put years different away again off went old number"
)
SHAREGPT = ((161.0, 1.2), (338.0, 0.9))
"""Mean of prompts and of answers in tokens, as measured by Kwon et al. (2023, arXiv:2309.06180), and sigma of the logarithm, which
is ours. The longest are cut, which lowers the means."""
SHORTEST = 4


@dataclass(frozen=True)
class DatasetChat:
    """A chat of a dataset: the prompts of its turns, and the tokens of the answer to each."""

    prompts: list[str]
    new_tokens: list[int | None]
    system: str = ""


class TextSource:
    """Draws prompts of a given length."""

    def __init__(self, settings: LoadSettings) -> None:
        self._words = COMMON_WORDS.split()
        self._ids_below = 0
        """Prompts are token ids below this; 0: words."""
        self.tokenizer: Tokenizer | None = None
        if settings.tokenizer_name:
            self.tokenizer = load_tokenizer(settings.tokenizer_name, settings.revision)
            self._words = _single_tokens(self.tokenizer)
            self._special = len(self.tokenizer.encode("").ids)
        elif settings.dialect == "openai" and settings.turns == 1 and settings.scenario is None:
            self._ids_below = settings.vocab_size

    def blocks(self, seed: int, ids: Sequence[int], size: int, length: int) -> Prompt:
        """Return a prompt of `length` tokens made of blocks of `size` tokens. The same number is the same block."""
        blocks = (self._pieces(np.random.default_rng((seed, 2, number)), size) for number in ids)
        return self._prompt(np.concatenate([*blocks])[: self._count(length)])

    def draw(self, random: np.random.Generator, length: int) -> Prompt:
        """Return a prompt of `length` tokens."""
        return self._prompt(self._pieces(random, self._count(length)))

    def _count(self, length: int) -> int:
        return max(1, length - self._special) if self.tokenizer is not None else length

    def _pieces(self, random: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Return token ids, or places of words."""
        first, end = (FIRST_ID, self._ids_below) if self._ids_below else (0, len(self._words))
        return random.integers(first, end, count)

    def _prompt(self, pieces: npt.NDArray[np.int64]) -> Prompt:
        if self._ids_below:
            return [int(token) for token in pieces.tolist()]
        return " ".join([self._words[at] for at in pieces.tolist()])

    def count(self, text: str) -> int | None:
        """Return the tokens of a text; None without a tokenizer."""
        return None if self.tokenizer is None else len(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _single_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the words that are one token each, as first word and after a space, so that a text of n words has n tokens."""

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    words = [word for word in COMMON_WORDS.split() if tokens(word) == 1 and tokens(f"the {word}") == tokens("the") + 1]
    if len(words) < 2:
        fail("the tokenizer has no tokens for common English words: use --dataset")
    return words


def load_tokenizer(name: str, revision: str) -> Tokenizer:
    """Return a tokenizer from a file, a folder, or the local cache of the Hub; nothing is downloaded."""
    path = Path(name)
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.exists():
        from huggingface_hub import hf_hub_download  # slow to import

        try:
            path = Path(hf_hub_download(name, "tokenizer.json", revision=revision, local_files_only=True))
        except Exception:  # noqa: BLE001 - the library has many; all mean that it is not there
            fail(f"--tokenizer-name: no tokenizer.json at {name}, nor in the local cache of the Hub")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exceptions
        fail(f"--tokenizer-name: {path}: {error}")


def draw_lengths(settings: LoadSettings, random: np.random.Generator) -> tuple[int, int]:
    """Return the prompt tokens and new tokens of a request."""
    most = (settings.prompt_tokens, settings.new_tokens)
    if settings.lengths == "fixed":
        return most
    prompt, new = (
        min(longest, max(SHORTEST, round(random.lognormal(math.log(mean) - sigma**2 / 2, sigma))))
        for (mean, sigma), longest in zip(SHAREGPT, most, strict=True)
    )
    return prompt, new


def read_records(path: Path, option: str) -> list[dict[str, Any]]:
    """Return the objects of a JSON array or of JSON lines; one line and an exit if there are none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{option}: {path}: {getattr(error, 'strerror', None) or 'no UTF-8'}")
    try:
        if text.lstrip().startswith("["):
            records = json.loads(text)
        else:
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        fail(f"{option}: {path}: no JSON: {error}")
    if not records:
        fail(f"{option}: {path}: no records")
    if not all(isinstance(record, dict) for record in records):
        fail(f"{option}: {path}: a record is no JSON object")
    return list(records)


def read_dataset(settings: LoadSettings, source: TextSource) -> list[DatasetChat]:
    """Return the records of --dataset that have a prompt, with at most --turns turns each."""
    if settings.dataset is None:
        return []
    records = (_record(fields, source) for fields in read_records(settings.dataset, "--dataset"))
    chosen = [
        DatasetChat(record.prompts[: settings.turns], record.new_tokens[: settings.turns], record.system)
        for record in records
        if record.prompts
    ]
    if not chosen:
        fail(f"--dataset: {settings.dataset}: no record has a prompt, messages or conversations")
    return chosen


def _record(fields: dict[str, Any], source: TextSource) -> DatasetChat:
    length = number_of(fields, ("output_length", "output_tokens", "max_tokens"))
    if isinstance(prompt := fields.get("prompt"), str):
        answer = fields.get("completion")
        return DatasetChat([prompt], [length or (source.count(answer) if isinstance(answer, str) else None)])
    prompts: list[str] = []
    answers: list[int | None] = []
    system = ""
    messages = fields.get("messages") or fields.get("conversations") or ()
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        role, text = message.get("role") or message.get("from"), message.get("content") or message.get("value")
        if not isinstance(text, str):
            continue
        if role == "system":
            system = text
        elif role in ("user", "human"):
            prompts.append(text)
            answers.append(length)
        elif answers and answers[-1] is None:
            answers[-1] = source.count(text)
    return DatasetChat(prompts, answers, system)


def number_of(fields: dict[str, Any], names: Sequence[str]) -> int | None:
    """Return the first of some fields that is a positive number."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < 1e9:
            return int(value)
    return None
