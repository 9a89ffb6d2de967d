"""The Engine protocol, the values that cross it, and the checks of these values.

An engine holds sequences in numbered slots and runs steps over them. One thread calls it, one call at a time:

    apply(orders)  at a step boundary: release, place, allocate, set the prompt chunks of the next step; fast, computes nothing
    step()         one forward pass over everything that can advance, or None if nothing can

Token ids in, token ids out: no text, no gRPC, no asyncio. `step.table.SequenceTable` does the bookkeeping that all engines
scheduled by the router share.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.copies import Copy, CopyEnd
from text_generation_proto.values import (
    ENGINE,
    FailureCode,
    FinishReason,
    Grammar,
    GrammarKind,
    LogprobOptions,
    Sampling,
    Stopping,
    TraceContext,
    WarmUpLimits,
)
from text_generation_shard.grammar import Grammars, Matcher

if TYPE_CHECKING:
    from text_generation_shard.adapters import LoraAdapter


class Scheduling(Enum):
    """The side that decides what runs in a step."""

    STEP = "step"
    """The router, step by step."""
    SELF = "self"
    """The engine."""


class EngineError(Exception):
    """The engine cannot be built, warmed up or used any more. The message is one line for the operator."""


class InsufficientMemory(EngineError):
    """The requested limits do not fit in memory."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of an engine; the fields are those of InfoResponse in shard.proto."""

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
    """(field of Sampling, Stopping or LogprobOptions that this engine does not support, reason)."""
    reserves_max_length: bool = False
    """Self-scheduling engines: admits a sequence only if KV blocks for prompt + max_new_tokens are free."""
    suggested_chunk_tokens: int = 0
    """Prompt tokens in a step beside as many decoding sequences as prompts that wait; 0: as many as without decoding."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that sequences may have."""
    max_loras: int = 0
    """Most different adapters of the sequences held at a time; 0: no limit."""
    scores_generated: bool = False
    """Sequences may be replays: LogprobOptions.generated."""
    kv_cache_dtype: str = ""
    """The FP8 type of the KV cache; empty: `dtype`."""
    max_tokens_per_step: int = 0
    """Most new tokens of a sequence in a step; 0: one."""
    max_images: int = 0
    """Images that a prompt may have; 0: the model takes none."""
    ranks: int = 1
    """Self-scheduling engines: parts with a batch and a KV cache of their own."""


@dataclass(frozen=True, slots=True)
class Media:
    """An image of a prompt. The prompt has the model's own placeholder ids at its positions."""

    offset: int
    """The position in the prompt of its first token."""
    tokens: int
    """Tokens of the prompt that stand for it, with those between its rows."""
    digest: bytes
    """SHA-256 of `data`."""
    data: bytes
    """The file: PNG, JPEG, WebP or GIF (first frame)."""

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.offset + self.tokens


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that starts in a slot. `prompt` ends with `generated_tokens` ids that were generated earlier."""

    slot: int
    prompt: Sequence[int]
    """Never changed. From the wire it is an array, which takes a ninth of the memory of a tuple, and is copied at once."""
    stopping: Stopping
    sampling: Sampling = Sampling()
    blocks: tuple[int, ...] = ()
    computed_tokens: int = 0
    generated_tokens: int = 0
    logprobs: LogprobOptions = LogprobOptions()
    grammar: Grammar | None = None
    matcher: Future[Matcher] | None = None
    """The matcher of `grammar`. `Engine.grammars` starts to build it before the orders are applied."""
    cache_salt: str = ""
    """For an engine with a prefix cache of its own: sequences share blocks only under the same salt."""
    adapter: str = ""
    """LoRA adapter to compute it with; "": the model alone."""
    priority: int = 0
    """For an engine with a queue of its own: from 1, the most urgent, to 4; 0: unspecified."""
    rank: int = 0
    """The rank of the engine that computes it, counted from 1; 0: any."""
    trace: TraceContext | None = None
    """The sampled trace of its request."""
    further_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """The KV blocks of each group after the first, and before them the index of the first."""
    draft_scope: str = ""
    """Sequences of other scopes are not drafted from its output."""
    no_drafts: bool = False
    """True: nothing is drafted for it."""
    prediction: tuple[int, ...] = ()
    """Tokens that the new ones are likely to be, but for some edits."""
    media: tuple[Media, ...] = ()
    """The images of the prompt, in order."""
    images: Future[Any] | None = None
    """`media`, as the engine's encoder takes them. `Engine.decode_images` starts that before the orders are applied."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Changes at one step boundary, applied in this order: releases, new sequences, blocks, prefill chunks."""

    number: int
    release: tuple[int, ...] = ()
    placements: tuple[NewSequence, ...] = ()
    allocations: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(slot, additional KV blocks)."""
    prefill: tuple[tuple[int, int], ...] = ()
    """(slot, prompt tokens to compute in the next step)."""
    further_allocations: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...] = ()
    """The allocations of each group after the first; of states (slot, (position of the first token that writes to it, block))."""
    copies: tuple[Copy, ...] = ()
    on_copied: Callable[[], None] = lambda: None
    """Called on any thread when one of them has ended: a step then reports it."""


@dataclass(frozen=True, slots=True)
class Failure:
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
    """The log-probability of the token at each prompt position; NaN where none was computed."""

    slot: int
    logprobs: list[float]
    tops: list[tuple[tuple[int, ...], tuple[float, ...]]] | None = None
    """If requested: ids and logprobs of the most probable tokens of each position, best first; empty where NaN."""


@dataclass(slots=True)
class TokenScores:
    """The scores of the generated tokens of a replay, in columns; NaN where none was computed."""

    slot: int
    logprobs: list[float]
    drawn_ids: list[int]
    """The token that (seed, position) draws in the place of each."""
    drawn_logprobs: list[float]


@dataclass(slots=True)
class Drafting:
    """Counts of speculative decoding, of one source."""

    drafts: int = 0
    """Steps of a sequence in which tokens were drafted."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    source: str = ENGINE
    by_slot: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, its drafted tokens, those of them that were accepted) of slots that got tokens, where the engine tells it."""


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
    generated_scores: list[TokenScores] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)
    """(slot, prompt tokens found in the prefix cache of a self-scheduling engine)."""
    drafting: list[Drafting] = field(default_factory=list)
    """Speculative decoding since the report before, by source."""
    copied: list[CopyEnd] = field(default_factory=list)
    """Copies that have ended."""
    forward_ns: int = 0
    """Time of the forward pass; in a report, of all steps since the report before."""

    step: int = 0
    """Steps run in this session."""
    orders_applied: int = 0
    """Number of the last orders applied."""
    step_ns: int = 0
    """Time of the steps since the report before: none, one, or several with silent results."""
    running: int = 0
    used_blocks: int = 0
    queued: int = 0

    @property
    def is_silent(self) -> bool:
        """True if it has nothing for a client: a self-scheduling engine may hold tokens back to report them together."""
        return not (self.slots or self.prefilled or self.finished or self.failed or self.drafting or self.copied)

    @property
    def is_step(self) -> bool:
        """False if nothing was computed, and only copies have ended."""
        return bool(self.forward_ns) or not self.copied


class Engine(Protocol):
    """Runs steps. All methods except `wake` are called on one thread. After `close` none is called."""

    @property
    def info(self) -> EngineInfo:
        """The description of this engine; constant, apart from `adapters`."""

    @property
    def grammars(self) -> Grammars | None:
        """The builder of grammar matchers; constant. None if the engine supports no grammars. Used from any thread."""

    @property
    def decode_images(self) -> Callable[[NewSequence], Future[Any]] | None:
        """Starts to decode the images of a sequence; constant. None if the engine takes no images. Used from any thread."""

    def warm_up(self, limits: WarmUpLimits) -> tuple[CacheGroup, ...]:
        """Drop every sequence, run the largest step, and return the groups of the KV cache, a full one first. Raises InsufficientMemory."""

    def apply(self, orders: Orders) -> list[Failure]:
        """Make the changes of `orders`. Return the sequences that broke the contract and were dropped."""

    def step(self) -> StepResult | None:
        """Advance everything that can advance by one forward pass; return None if nothing can.

        A self-scheduling engine computes on its own threads: its step blocks until there is a result, or `wake` is called.
        """

    def set_adapter(self, name: str, adapter: "LoraAdapter | None") -> Iterator[None]:
        """Load a LoRA adapter; None: free it after its last sequence. Advanced at step boundaries to its end. Raises EngineError."""

    def wake(self) -> None:
        """Interrupt a blocking `step`: new orders arrived. May be called from any thread."""

    @property
    def running(self) -> int:
        """Number of sequences held, queued ones included."""

    @property
    def used_blocks(self) -> int:
        """Number of KV blocks of the first group that those sequences hold; a shared block counts once."""

    @property
    def queued(self) -> int:
        """Number of sequences in the engine's own queue."""

    @property
    def prefilling(self) -> int:
        """Number of prompt tokens that the step in progress, or the last one, waits for. May be read from any thread."""

    def on_broken(self, callback: Callable[[str], None]) -> None:
        """Register a callback, called from any thread, for a failure that `step` would raise, with its reason."""

    def reset(self) -> None:
        """Drop every sequence."""

    def close(self) -> None:
        """Free the device."""


class SynchronousEngine:
    """Defaults for engines that work only inside the calls made to them."""

    decode_images: Callable[[NewSequence], Future[Any]] | None = None

    @property
    def queued(self) -> int:
        """Always 0: there is no queue besides the client's."""
        return 0

    def wake(self) -> None:
        """Do nothing: a step blocks only to compute."""

    def on_broken(self, callback: Callable[[str], None]) -> None:
        """Do nothing: every failure is raised by a call."""
