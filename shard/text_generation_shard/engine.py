"""The Engine protocol, and the values that cross it.

An engine holds sequences in numbered slots and computes steps over them. One thread drives it, one call at a time:

    apply(orders)  at a step boundary: drop, admit, grant, name the chunks of the next step; quick, never computes
    step()         one forward pass over everything that can advance, or None if nothing can

Ids in, ids out; no text, no gRPC, no asyncio. `sequences.SequenceTable` does the bookkeeping that all step engines share.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from text_generation_proto.values import (
    FailureCode,
    FinishReason,
    Grammar,
    GrammarKind,
    LogprobOptions,
    Sampling,
    Stopping,
)

if TYPE_CHECKING:
    from text_generation_shard.grammar import Grammars, Matcher


class Scheduling(Enum):
    """Who decides what runs in a step."""

    STEP = "step"
    SELF = "self"


class EngineError(Exception):
    """The engine cannot be built or warmed up as asked: one clear line for the operator, no traceback."""


class InsufficientMemory(EngineError):
    """The limits asked for do not fit in the memory there is."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and can do; the fields are those of InfoResponse in shard.proto."""

    engine: str
    model_id: str
    model_type: str
    dtype: str
    device: str
    scheduling: Scheduling
    vocab_size: int
    max_sequence_length: int
    max_slots: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    suggested_prefill_tokens: int
    max_top_n_tokens: int
    grammar_kinds: tuple[GrammarKind, ...] = ()
    unsupported: tuple[tuple[str, str], ...] = ()
    """(field of Sampling, Stopping or LogprobOptions that this engine cannot honour, why)."""
    reserves_longest: bool = False
    """Of an engine that schedules for itself: a sequence begins only once all the KV blocks it may come to need are free."""


@dataclass(frozen=True, slots=True)
class WarmUpLimits:
    """What steps the engine must be ready for. Zero leaves the choice to the engine."""

    max_batch_prefill_tokens: int = 0
    max_batch_size: int = 0
    max_batch_total_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to hold from now on. `prompt` includes `generated_tokens` trailing ids generated earlier."""

    slot: int
    prompt: tuple[int, ...]
    stopping: Stopping
    sampling: Sampling = Sampling()
    blocks: tuple[int, ...] = ()
    computed_tokens: int = 0
    generated_tokens: int = 0
    logprobs: LogprobOptions = LogprobOptions()
    grammar: Grammar | None = None
    matcher: Future[Matcher] | None = None
    """What comes of `grammar`: begun by `Engine.grammars` before the admission is applied."""
    cache_salt: str = ""
    """For an engine with a prefix cache of its own: sequences share computed blocks only under the same salt."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What is to change at one step boundary: releases first, then admissions, grants, prefill chunks."""

    number: int
    release: tuple[int, ...] = ()
    admit: tuple[NewSequence, ...] = ()
    grants: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(slot, KV blocks to grow into)."""
    prefill: tuple[tuple[int, int], ...] = ()
    """(slot, prompt tokens to compute in the next step)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A sequence that ended with an error."""

    slot: int
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most probable tokens at one position, best first. `index` counts the slot's tokens within the step."""

    slot: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class PromptScores:
    """Of each prompt position the log-probability of its token, NaN where none was computed."""

    slot: int
    logprobs: list[float]
    tops: list[tuple[tuple[int, ...], tuple[float, ...]]] | None = None
    """If asked for: the most probable tokens of each position and their logprobs, best first; empty where NaN."""


@dataclass(slots=True)
class StepResult:
    """The result of one step, in columns: slots[i] got the next token_counts[i] of token_ids and logprobs.

    A slot in `finished` or `failed` is free again: the engine has dropped its sequence. The engine fills the fields down to
    `forward_ns`, the session those below.
    """

    slots: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    """Empty: one token each."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prefilled: list[tuple[int, int]] = field(default_factory=list)
    """(slot, prompt tokens computed)."""
    finished: list[tuple[int, FinishReason]] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    top_tokens: list[TopTokens] = field(default_factory=list)
    prompt_logprobs: list[PromptScores] = field(default_factory=list)
    forward_ns: int = 0
    """Time of the forward pass; in a report, of all steps since the report before."""

    step: int = 0
    """Steps run in this session."""
    orders_applied: int = 0
    """Number of the last orders applied."""
    step_ns: int = 0
    """Time of the steps since the report before: none, one, or several whose results were silent."""
    running: int = 0
    used_blocks: int = 0
    queued: int = 0

    @property
    def is_silent(self) -> bool:
        """True if it has nothing for a client: a self-scheduling engine may hold tokens back to report them together."""
        return not (self.slots or self.prefilled or self.finished or self.failed)


class Engine(Protocol):
    """Runs steps. Every method but `wake` is called from one thread; none is called again after `close`."""

    @property
    def info(self) -> EngineInfo:
        """What this engine is; constant."""
        ...

    @property
    def grammars(self) -> Grammars | None:
        """Builds the matchers of grammars; constant, None where the engine serves no grammars. From any thread."""
        ...

    def warm_up(self, limits: WarmUpLimits) -> int:
        """Run the worst-case step, allocate the KV pool; the number of KV blocks. Drops every sequence.

        Raises InsufficientMemory if `limits` do not fit.
        """
        ...

    def apply(self, orders: Orders) -> list[Failure]:
        """Make the changes ordered; the sequences that cannot be as ordered, each dropped again."""
        ...

    def step(self) -> StepResult | None:
        """Advance everything that can advance by one forward pass; None if nothing can.

        An engine that schedules for itself computes on its own time: its step waits until there is something to tell,
        or `wake` is called.
        """
        ...

    def wake(self) -> None:
        """Orders wait: a step that waits for the engine's own doings is to return. From any thread."""
        ...

    @property
    def running(self) -> int:
        """Sequences held."""
        ...

    @property
    def used_blocks(self) -> int:
        """KV blocks those sequences hold; one that several share counts once."""
        ...

    @property
    def queued(self) -> int:
        """Those of `running` that wait in a queue of the engine's own."""
        ...

    def on_broken(self, tell: Callable[[str], None]) -> None:
        """Have `tell` called, from any thread, with the reason why the engine will never compute again, if so it is.

        Whatever `step` raises says the same; this is for when nobody steps.
        """
        ...

    def reset(self) -> None:
        """Drop every sequence."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...


class InProcess:
    """What engines have in common that compute in the calls made to them: nothing of theirs goes on between two."""

    @property
    def queued(self) -> int:
        """None: the client's queue is the only one."""
        return 0

    def wake(self) -> None:
        """Nothing to do: a step waits for nothing but its own computing."""

    def on_broken(self, tell: Callable[[str], None]) -> None:
        """Nothing to tell: what breaks breaks in a call."""
