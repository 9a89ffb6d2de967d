"""Grammars: constraints on the new tokens of a sequence, compiled to matchers that advance with it.

llguidance does the work: it reads the model's tokenizer.json once and compiles a JSON schema, a regular expression or Lark
rules to an automaton over its tokens. Compilation runs on threads of its own, with the GIL released, at low priority, within
llguidance's size limits. A grammar that is too large, or whose masks take too long, is refused. `step.masks` computes the allowed
tokens.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from text_generation_common.grammar_options import MAX_GRAMMAR_TEXT
from text_generation_common.grammar_tokenizer import compiled, end_tokens, load_tokenizer
from text_generation_common.log import log
from text_generation_common.model_files import MAX_TOKENIZER_BYTES, find_file, read_file
from text_generation_common.one_line import one_line
from text_generation_common.panics import PanicError, without_backtrace, without_panics
from text_generation_proto.values import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MASK_BUDGET_S = 0.05
"""Limit of the CPU time of a mask. A JSON schema's takes 0.1 ms."""
SLOW_MASK_S = 0.002
"""CPU time of a mask for which a step does not wait."""
MAX_SLOW_MASKS = 3
"""Slow masks of a sequence after which all of its masks are computed beside the steps."""
SLOW_MASKS_BUDGET_S = 5.0
"""CPU time of all masks of a sequence that are computed beside the steps."""
MAX_COMPILED = 4
"""Compiled grammars that are kept."""
TOO_SLOW = "the grammar takes too long to follow: repeat less, or fewer times"
CLOSING = ('"', "}", "]")


class GrammarError(Exception):
    """The grammar cannot be used; the message is one line for the client."""


@dataclass(slots=True)
class Matcher:
    """The state of one sequence in its grammar. Used by one thread at a time."""

    raw: LLMatcher
    beside: Future[NDArray[np.int32]] | None = None
    """Its next mask, packed, if that is computed beside the steps."""
    is_slow: bool = False
    """True if the next mask is to be computed beside the steps."""
    _slow_masks: int = 0
    _spent_s: float = 0.0
    _exceeds: bool = False

    @property
    def is_ready(self) -> bool:
        """False while its next mask is computed beside the steps."""
        return self.beside is None or self.beside.done()

    @property
    def is_quick(self) -> bool:
        """True if steps compute its masks."""
        return self.beside is None and not self.is_slow

    def copy(self) -> Matcher:
        """Return a matcher in the same state, which advances by itself."""
        return replace(self, raw=self.raw.deep_copy())

    def count(self, ahead: Matcher) -> None:
        """Count the masks of a copy that went ahead as its own; none of them ends the sequence, which may go another way."""
        self.is_slow, self._slow_masks, self._spent_s = ahead.is_slow, ahead._slow_masks, ahead._spent_s

    @without_panics
    def compute(self, words: int) -> NDArray[np.int32]:
        """Return the next mask in `words` of 32 bits, and count its CPU time."""
        mask = np.zeros(words, dtype=np.int32)
        started = time.thread_time()
        self.raw.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        seconds = time.thread_time() - started
        self.is_slow = seconds > SLOW_MASK_S or self._slow_masks >= MAX_SLOW_MASKS
        if self.is_slow:
            self._slow_masks += 1
            self._spent_s += seconds
        self._exceeds = seconds > MASK_BUDGET_S or self._spent_s > SLOW_MASKS_BUDGET_S
        return mask

    def compute_first(self, words: int) -> None:
        self.beside = Future()
        self.beside.set_result(self.compute(words))

    @without_panics
    def accept(self, token_id: int) -> None:
        """Advance by one token. A token that the grammar does not allow sets `problem`."""
        self.raw.consume_token(token_id)

    @property
    def may_end(self) -> bool:
        """True if the text so far is complete."""
        return self.raw.is_accepting()

    @property
    def problem(self) -> str | None:
        """The error that stopped the matcher, in one line; None if there is none."""
        if self.raw.is_error():
            return f"the grammar cannot be followed: {_reason(self.raw.get_error())}"
        return TOO_SLOW if self._exceeds else None


class Grammars:
    """Builds matchers for one tokenizer, in the background."""

    kinds: ClassVar = (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK)
    """The grammar kinds that `build` supports."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.vocab_size: int = tokenizer.vocab_size
        self.end_token_ids = frozenset(end_tokens(tokenizer))
        """Tokens that end a text: the model's EOS tokens, else the tokenizer's own."""
        self.closing_token_ids = tuple(
            token_ids[0] for text in CLOSING if len(token_ids := tokenizer.tokenize_str(text)) == 1
        )
        """Tokens that close a JSON string, object or array."""
        self._tokenizer = tokenizer
        self._words = -(-self.vocab_size // 32)
        self._compiled = lru_cache(maxsize=MAX_COMPILED)(self._compile)
        """The matcher of a grammar at its start: the sequences of a request get copies."""
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar", initializer=lower_priority)

    def is_special(self, token_id: int) -> bool:
        """Return True for a control token, which has no text."""
        return self._tokenizer.is_special_token(token_id)

    def build(self, grammar: Grammar, generated: Sequence[int] = ()) -> Future[Matcher]:
        """Compile a matcher and advance it by the `generated` tokens. Fails with GrammarError. May be called from any thread."""
        return self._pool.submit(self._build, grammar, generated)

    def close(self) -> None:
        """Cancel compilations that have not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @without_panics
    def _build(self, grammar: Grammar, generated: Sequence[int]) -> Matcher:
        matcher = self._compiled(grammar).copy()
        if generated:
            if not matcher.raw.consume_tokens(list(generated)):
                raise GrammarError("the tokens generated before do not fit the grammar")
            matcher.compute_first(self._words)
        if problem := matcher.problem:
            raise GrammarError(problem)
        return matcher

    def _compile(self, grammar: Grammar) -> Matcher:
        if len(grammar.text) > MAX_GRAMMAR_TEXT:
            raise GrammarError(f"the grammar is longer than {MAX_GRAMMAR_TEXT} characters")
        try:
            raw = compiled(grammar, self._tokenizer)
        except ValueError as error:
            raise GrammarError(f"the grammar cannot be read: {_reason(str(error))}") from None
        if raw.is_error():
            raise GrammarError(f"the grammar cannot be used: {_reason(raw.get_error())}")
        matcher = Matcher(raw)
        matcher.compute_first(self._words)
        return matcher


def load_grammars(folder: str, eos_token_ids: Sequence[int] = ()) -> Grammars | None:
    """Load the tokenizer.json in `folder`; return None if there is none, or llguidance cannot read it."""
    name = "tokenizer.json"
    if not folder or find_spec("llguidance") is None:
        return None
    if not Path(folder, name).is_file():
        log.warning("no grammars: the model folder has no tokenizer", folder=folder)
        return None
    try:
        text = read_file(find_file(Path(folder), name), MAX_TOKENIZER_BYTES).decode()
        tokenizer = load_tokenizer(text, list(eos_token_ids))
    except (OSError, ValueError, PanicError) as error:
        log.warning("no grammars: the tokenizer cannot be read", reason=_reason(str(error)))
        return None
    return Grammars(tokenizer)


def lower_priority() -> None:
    """Give this thread only the CPU time that others leave. On Linux, niceness is per thread."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def _reason(message: str) -> str:
    words = one_line(without_backtrace(message).replace("<non-verbose/>", ""))
    return "no text can match it" if words == "NoExtensionBias" else words
