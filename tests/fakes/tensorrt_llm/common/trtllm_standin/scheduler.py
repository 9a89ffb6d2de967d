"""The scheduler of iterations: the waiting queue, the active requests, the KV cache.

As near 1.2.1 (py_executor.py): submitted requests wait; up to `max_batch_size` are active; of these, in order, those run whose
whole prompt and output fit in the KV cache (GUARANTEED_NO_EVICT), within the token budget of the iteration.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field

from trtllm_standin.sequences import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an engine."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    chunked_prefill: bool
    vocab_size: int
    num_blocks: int
    block_size: int
    stream_interval: int
    reuses_blocks: bool


@dataclass(slots=True)
class Batch:
    """The work of one iteration."""

    sampling: list[Sequence] = field(default_factory=list)
    """Sequences that get tokens: all except prompts that continue in the next iteration."""
    context_sequences: int = 0
    context_tokens: int = 0
    generation_sequences: int = 0

    def __bool__(self) -> bool:
        return bool(self.context_sequences or self.generation_sequences)


class PrefixCache:
    """The most recently computed whole blocks.

    A block is identified by all tokens up to its end and by the salt of its request (cache_salt, 1.2.1: llm.py).
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._known: OrderedDict[int, None] = OrderedDict()

    def match(self, prompt: AnySequence[int], salt: str | None) -> int:
        """Return the number of cached tokens at the front: whole blocks, never the last token."""
        matched = 0
        for key in self._keys(prompt[:-1], salt):
            if key not in self._known:
                break
            self._known.move_to_end(key)
            matched += self._block_size
        return matched

    def store(self, tokens: AnySequence[int], salt: str | None) -> None:
        """Add the whole blocks of a sequence."""
        for key in self._keys(tokens, salt):
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def _keys(self, tokens: AnySequence[int], salt: str | None) -> list[int]:
        keys = []
        key = hash(salt)
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            key = hash((key, tuple(tokens[end - self._block_size : end])))
            keys.append(key)
        return keys


class Scheduler:
    """Sequences from submission to end. Used by the engine's thread only."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.used_blocks = 0
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []
        self._cache = PrefixCache(limits.num_blocks, limits.block_size)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        return not self.active and not self.waiting

    def activate(self) -> list[tuple[Sequence, str]]:
        """Admit waiting sequences up to the batch size. Return those that are refused, and why."""
        refused = []
        while self.waiting and len(self.active) < self.limits.max_batch_size:
            sequence = self.waiting.popleft()
            prompt = sequence.request.prompt
            if min(prompt) < 0 or max(prompt) >= self.limits.vocab_size:  # py_executor.py, _validate_request
                refused.append((sequence, "Token ID out of range"))
            else:
                self.active.append(sequence)
        return refused

    def schedule(self) -> Batch:
        """Choose the sequences that run, and allocate the blocks of those that start."""
        batch = Batch([sequence for sequence in self.active if sequence.is_generating])
        batch.generation_sequences = len(batch.sampling)
        if batch.generation_sequences == len(self.active):
            return batch
        budget = self.limits.max_num_tokens - batch.generation_sequences
        for sequence in self.active:
            if sequence.is_generating:
                continue
            if not self._start(sequence):
                break  # the capacity scheduler stops at the first that does not fit
            chunk = self._chunk(sequence, budget)
            if chunk <= 0:
                break
            budget -= chunk
            sequence.prefilled += chunk
            batch.context_sequences += 1
            batch.context_tokens += chunk
            if sequence.prefilled == len(sequence.request.prompt):
                self._finish_prefill(sequence)
                batch.sampling.append(sequence)
        return batch

    def end(self, ended: list[Sequence]) -> None:
        """Remove sequences and free their blocks."""
        for sequence in ended:
            self.used_blocks -= sequence.blocks
            sequence.blocks = 0
            if self.limits.reuses_blocks and sequence.is_generating:
                self._cache.store([*sequence.request.prompt, *sequence.generated], sequence.request.salt)
        gone = set(map(id, ended))
        self.active = [sequence for sequence in self.active if id(sequence) not in gone]

    def _start(self, sequence: Sequence) -> bool:
        if sequence.blocks:
            return True
        request = sequence.request
        blocks = -(-(len(request.prompt) + request.limit) // self.limits.block_size)
        if self.used_blocks + blocks > self.limits.num_blocks:
            return False
        self.used_blocks += blocks
        sequence.blocks = blocks
        if self.limits.reuses_blocks:
            sequence.cached = sequence.prefilled = self._cache.match(request.prompt, request.salt)
        return True

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Return the prompt tokens to compute now: the rest, or with chunked prefill the whole blocks that fit."""
        left = len(sequence.request.prompt) - sequence.prefilled
        if left <= budget:
            return left
        return budget // self.limits.block_size * self.limits.block_size if self.limits.chunked_prefill else 0

    def _finish_prefill(self, sequence: Sequence) -> None:
        sequence.is_generating = True
        sequence.score_prompt()
        if self.limits.reuses_blocks:
            self._cache.store(sequence.request.prompt, sequence.request.salt)
