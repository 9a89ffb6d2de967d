"""Token masks: the tokens that grammars allow next, for all sequences of a step at once.

Masks depend only on tokens known before the step begins: an engine starts them, runs its forward pass, and takes the result
after it. llguidance computes them in parallel with the GIL released. A step has a time budget for them. Masks beyond it, and
those of sequences with slow ones, are computed beside the steps at low priority: such a sequence misses steps, others do not.
"""

import time
from collections.abc import Sequence as Sequences
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from text_generation_common.cpus import usable_cpus
from text_generation_common.panics import without_panics
from text_generation_shard.grammar import SLOW_MASK_S, Grammars, Matcher, lower_priority
from text_generation_shard.step.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor

MAX_THREADS = 8
AT_ONCE = 2
"""Masks for each thread that are computed before the time is looked at."""
STEP_BUDGET_S = 0.003
"""Time of the masks of a step, besides MASK_S for each on one thread."""
MASK_S = 0.0001

Bits = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Mask:
    """The tokens that may follow a sequence."""

    allowed: Bits
    """[vocabulary] False for tokens that the grammar forbids."""
    may_end: bool
    """True if the text so far is complete."""
    is_complete: bool = False
    """True if only an end token may follow: the sequence ends with it."""
    failure: str | None = None
    """The reason why the mask is missing."""


class TokenMasks:
    """Computes masks over the model's vocabulary of `vocab_size`, which may differ in size from the tokenizer's."""

    def __init__(self, grammars: Grammars, vocab_size: int, *, in_step: bool = False) -> None:
        """`in_step`: steps wait for all masks, because the engine cannot compute a position again."""
        self._ends = _ids(grammars.end_token_ids, vocab_size)
        self._words = -(-grammars.vocab_size // 32)
        # The grammar cannot allow tokens that the tokenizer does not have.
        self._vocab_size = vocab_size
        self._known = min(grammars.vocab_size, vocab_size)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._in_step = in_step
        self._beside = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="slow-masks", initializer=None if in_step else lower_priority
        )
        self._threads = min(usable_cpus(), MAX_THREADS)
        self._executor: LLExecutor | None = None

    def start(self, sequences: Sequences[Sequence]) -> Future[dict[int, Mask]]:
        """Compute masks by slot for the sequences with a matcher. The matchers must not be used until the result is there.

        The result lacks the sequences whose mask is not ready: they must not advance in this step.
        """
        constrained = [(s, s.matcher) for s in sequences if s.matcher is not None]
        return self._thread.submit(self._compute, constrained)

    def close(self) -> None:
        """Cancel computations that have not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._beside.shutdown(wait=False, cancel_futures=True)

    @without_panics
    def _compute(self, constrained: list[tuple[Sequence, Matcher]]) -> dict[int, Mask]:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=self._threads)
        packed = np.zeros((len(constrained), self._words), dtype=np.int32)
        quick: list[tuple[Matcher, int]] = []
        for row, (_, matcher) in enumerate(constrained):
            if matcher.beside is not None and matcher.beside.done():
                packed[row], matcher.beside = matcher.beside.result(), None
            elif matcher.is_slow:
                self._compute_beside(matcher)
            else:
                quick.append((matcher, row))
        left_s = STEP_BUDGET_S + MASK_S * len(quick) / self._threads
        at_once = AT_ONCE * self._threads
        for some in (quick[first : first + at_once] for first in range(0, len(quick), at_once)):
            if left_s <= 0:
                for matcher, _ in some:
                    self._compute_beside(matcher)
                continue
            started = time.perf_counter()
            matchers = [(matcher.raw, row) for matcher, row in some]
            self._executor.unsafe_compute_mask_ptr(matchers, packed.ctypes.data, self._words * 4, len(constrained))
            left_s -= (seconds := time.perf_counter() - started)
            for matcher, _ in some:
                matcher.is_slow = seconds > AT_ONCE * SLOW_MASK_S
        if self._in_step:
            for row, (_, matcher) in enumerate(constrained):
                if matcher.beside is not None:
                    packed[row], matcher.beside = matcher.beside.result(), None
        allowed = self._unpack(packed)
        return {
            sequence.slot: self._finish(allowed[row], sequence, matcher)
            for row, (sequence, matcher) in enumerate(constrained)
            if matcher.beside is None
        }

    def now(self, sequence: Sequence, matcher: Matcher) -> Mask:
        """Return the mask of one sequence, computed on this thread."""
        ready, matcher.beside = matcher.beside, None
        packed = matcher.compute(self._words) if ready is None else ready.result()
        return self._finish(self._unpack(packed[np.newaxis])[0], sequence, matcher)

    def _unpack(self, packed: NDArray[np.int32]) -> Bits:
        unpacked = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little", count=self._known).view(np.bool_)
        allowed = np.zeros((len(packed), self._vocab_size), dtype=np.bool_)
        allowed[:, : self._known] = unpacked
        return allowed

    def _compute_beside(self, matcher: Matcher) -> None:
        if matcher.beside is None:
            matcher.beside = self._beside.submit(matcher.compute, self._words)

    def _finish(self, allowed: Bits, sequence: Sequence, matcher: Matcher) -> Mask:
        """Replace llguidance's end tokens with those of the sequence, and apply min_new_tokens."""
        if problem := matcher.problem:
            return Mask(allowed, may_end=False, failure=problem)
        may_end = matcher.may_end
        eos = _ids(sequence.stopping.eos_token_ids, self._vocab_size)
        allowed[self._ends] = False
        allowed[eos] = False
        if not allowed.any():
            if not may_end:
                return Mask(allowed, may_end, failure="the grammar allows no token that the model has")
            allowed[eos if eos.size else self._ends] = True
            return Mask(allowed, may_end, is_complete=True)
        if sequence.suppressed:
            early = allowed.copy()
            early[_ids(sequence.suppressed, self._vocab_size)] = False
            # If only a stop token fits, the grammar takes precedence over min_new_tokens.
            return Mask(early if early.any() else allowed, may_end)
        allowed[eos] = may_end
        return Mask(allowed, may_end)


def choice_of_tokens(sequence: Sequence, mask: Mask | None, vocab_size: int) -> tuple[Bits | None, frozenset[int]]:
    """Return the tokens that may follow, None for all, and those that must not all the same.

    In this order: the grammar, allowed_token_ids, min_new_tokens, bad_words. A constraint does not apply to a token if it
    leaves none; a text that allowed_token_ids let not go on ends there if the grammar lets it.
    """
    sampling = sequence.sampling
    allowed = None if mask is None or mask.failure is not None else mask.allowed
    if sampling.allowed_token_ids:
        if sequence.allowed is None:
            sequence.allowed = np.zeros(vocab_size, dtype=np.bool_)
            sequence.allowed[list(sampling.allowed_token_ids)] = True
        allowed = sequence.allowed if allowed is None else _first_choice(sequence, allowed, sequence.allowed)
    # A mask already excludes the tokens that would end the text early.
    early = sequence.suppressed if mask is None else frozenset()
    banned = sequence.banned if sampling.bad_words else frozenset()
    if allowed is None:
        return None, early | banned
    suppressed = early if _leave_some(allowed, early) else frozenset()
    return allowed, suppressed | banned if _leave_some(allowed, suppressed | banned) else suppressed


def _first_choice(sequence: Sequence, allowed: Bits, listed: Bits) -> Bits:
    """Return the tokens of both sets; if there is none, the end tokens of the grammar's, or all of them."""
    both: Bits = allowed & listed
    if both.any():
        return both
    eos = _ids(sequence.stopping.eos_token_ids, len(allowed))
    both[eos] = allowed[eos]
    return both if both.any() else allowed


def _leave_some(allowed: Bits, suppressed: frozenset[int]) -> bool:
    if not suppressed:
        return True
    return bool(np.count_nonzero(allowed) > np.count_nonzero(allowed[_ids(suppressed, len(allowed))]))


def _ids(token_ids: Sequences[int] | frozenset[int], vocab_size: int) -> NDArray[np.intp]:
    return np.array(sorted(token_id for token_id in token_ids if token_id < vocab_size), dtype=np.intp)
