"""ScheduledSequence: the scheduler's state of one request. Outside the scheduler there is only a RequestId."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from text_generation_router.request import NO_MOVES, Moves, Request, RequestId, RequestProgress, TokenId
from text_generation_router.scheduling.lazy_heap import Key
from text_generation_router.scheduling.prefix_node import Node
from text_generation_router.scheduling.state_pool import HeldStates
from text_generation_router.scheduling.window_pool import HeldBlocks

MAX_MOVES = 100
"""Replicas that a request may lose in all."""


class State(Enum):
    """The state of a sequence.

    WAITING ──► PLACED ──► RUNNING ──► FINISHED, FAILED
       ▲          │           │
       └──────────┴ PREEMPTED ┴► CANCELLED

    WAITING     in the queue
    PLACED      has a slot and blocks of a replica; not sent to it yet
    PREEMPTED   its release is under way; late tokens still count, then it waits again
    CANCELLED   its release is under way; late tokens are ignored, then it is forgotten

    All sequences of a lost replica return to WAITING, except cancelled ones.
    """

    WAITING = auto()
    PLACED = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    CANCELLED = auto()
    FINISHED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A request, its generated tokens, its position in the queue, and its slot and KV blocks on a replica."""

    request: Request
    arrival: int
    """Order of arrival, unique."""
    arrived_at: float
    """Seconds of the caller's clock."""
    expected_new_tokens: int
    version: int = 0
    """The version of its adapter: another one may have had the name before."""
    state: State = State.WAITING
    generated: list[TokenId] = field(default_factory=list)

    # In the queue.
    job: str = ""
    """The name of the job of its tenant to which it belongs; "": none."""
    entry: float = 0.0
    """Virtual tokens with which a job entered when it was queued."""
    work: int = 0
    """Expected cost in tokens: prompt tokens that are not cached, and new tokens. Constant while queued."""
    queue_key: Key = (0.0, 0)
    """Orders the sequences of one tenant: (due time, arrival); for a requeued one (arrival, arrival)."""
    requeued: bool = False
    """True if it was preempted or lost its replica: it goes before all others."""
    resumed: bool = False
    """True if it ran before it was submitted here."""
    skipped: bool = False
    charged_tokens: int = 0
    """Tokens charged to its tenant."""

    # Lost replicas.
    moves: Moves = NO_MOVES
    generated_when_placed: int = 0

    # On a replica.
    replica: int = -1
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    """KV blocks, in order. The prefix tree owns the first `committed_blocks`, except `duplicate_blocks`."""
    committed_blocks: int = 0
    duplicate_blocks: list[int] = field(default_factory=list)
    """Own blocks whose content the tree already had from another sequence."""
    further: Sequence[HeldBlocks] = ()
    """Its blocks in the groups after the first."""
    states: HeldStates | None = None
    """Its blocks in the group of states; None if there is none."""
    prefix_lock: Node | None = None
    """Locked node of the prefix tree at which the committed blocks end."""
    cached_tokens: int = 0
    """Leading tokens whose KV was cached at placement."""
    loading: bool = False
    """True while some of them are being loaded: meanwhile its prompt counts as scheduled, and those as not computed."""
    loaded: bool = False
    """True if some of them were."""
    load_failed: bool = False
    """It loads nothing more: what could not be loaded stays on the host while others hold it."""
    own_cached_tokens: int = 0
    """Cached tokens that its own tenant computed or reused before."""
    engine_cached_tokens: int = 0
    """Prompt tokens that a self-scheduling engine found in its own prefix cache, in its first run."""
    counted_hits: int = 0
    """The part of `engine_cached_tokens` that was counted."""
    prefill_length: int = 0
    """Tokens to prefill in this placement: the prompt, and tokens generated before a preemption or move."""
    num_scheduled_tokens: int = 0
    """Prefill tokens that are cached or were sent as chunks."""
    num_computed_tokens: int = 0
    """Prefill tokens that are cached or were reported as computed."""
    capacity: int = 0
    """Positions that its blocks of all groups reach."""

    id: RequestId = field(init=False)
    length: int = field(init=False)
    """Known tokens: prompt and generated."""
    expected_length: int = field(init=False)
    """Length at its expected end."""
    max_length: int = field(init=False)
    """Positions whose KV may be needed. The KV of the last new token is not."""
    salt: str = field(init=False)
    """The key of its root in the prefix tree: sequences share blocks only with the same adapter and cache salt."""
    prompt_key: bytes = field(init=False)
    """The prompt as a key of the prefix tree; an image has words of its own in place of its tokens."""
    reusable_key: bytes = b""
    """Cache of `KVCache`: the whole blocks of its key, without the last token."""
    prefix_digests: Sequence[bytes] | None = None
    """Cache of `fleet.PrefixHints`."""

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.job = self.request.qos.job
        self.length = len(self.request.prompt)
        self.expected_length = self.length + self.expected_new_tokens
        self.max_length = self.length + self.request.max_new_tokens - 1
        # The name of an adapter contains no NUL, so no two pairs have the same key.
        self.salt = f"{self.request.adapter}\0{self.version}\0{self.request.qos.salt}"
        words = array("I", self.request.prompt)
        for media in self.request.media:
            own = media.image.words
            words[media.offset : media.offset + media.tokens] = (own * (media.tokens // len(own) + 1))[: media.tokens]
        self.prompt_key = words.tobytes()

    def resume(self, progress: RequestProgress) -> None:
        """Go on where another scheduler was lost."""
        self.generated = list(progress.generated)
        self.moves = progress.moves
        self.resumed = progress.moves.total > 0
        assert len(self.generated) < self.request.max_new_tokens, "a request that goes on has not ended"
        self.length += len(self.generated)
        self.expected_new_tokens = max(self.expected_new_tokens, len(self.generated) + 1)
        self.expected_length = len(self.request.prompt) + self.expected_new_tokens

    @property
    def further_held(self) -> Sequence[HeldBlocks | HeldStates]:
        """Its blocks in all groups after the first."""
        return self.further if self.states is None else (*self.further, self.states)

    @property
    def key(self) -> bytes:
        """All known tokens as a key of the prefix tree."""
        return self.prompt_key + array("I", self.generated).tobytes() if self.generated else self.prompt_key

    @property
    def deadline(self) -> Key:
        """(time at which it expires, arrival). `queue_by` counts until it was placed. Never decreases."""
        return self.request.qos.expires(queued=self.is_new), self.arrival

    @property
    def is_new(self) -> bool:
        """True if it has not left the queue."""
        return self.state is State.WAITING and not self.requeued

    @property
    def num_kv_tokens(self) -> int:
        """Leading positions whose KV is known to be computed. That of the newest token is not."""
        if self.num_computed_tokens < self.prefill_length:
            return self.num_computed_tokens
        return self.length - 1

    @property
    def may_be_idle(self) -> bool:
        """True unless a chunk is under way. One that ends inside an image may wait for its rest: some engines compute images whole."""
        end = self.num_scheduled_tokens
        return end == self.num_computed_tokens or self.request.has_image_around(end)

    @property
    def unscheduled_tokens(self) -> int:
        """Prompt tokens not yet sent as chunks."""
        return self.prefill_length - self.num_scheduled_tokens

    @property
    def remaining_work(self) -> int:
        """Expected tokens still to compute on its replica."""
        return self.prefill_length - self.num_computed_tokens + max(0, self.expected_length - self.length)

    def count_move(self) -> None:
        """Count the loss of the replica on which it runs."""
        self.moves = self.moves.after_loss(advanced=len(self.generated) > self.generated_when_placed)

    def cannot_move(self, max_fruitless_moves: int, *, self_scheduling: bool) -> str | None:
        """Return why it cannot go on after the loss of its replica; None if it can."""
        if self.moves.fruitless > max_fruitless_moves or self.moves.total > MAX_MOVES:
            return "the shards that computed this request were lost"
        if self_scheduling and self.request.grammar is not None and self.generated:
            # Such an engine can start a grammar only at the end of the prompt.
            return "lost its shard; a constrained answer cannot go on elsewhere"
        return None

    def hit(self, tokens: int) -> int:
        """Record the cached tokens that an engine reports; return those of which the client learns.

        Hits that only other tenants produced are not shown.
        """
        self.engine_cached_tokens = told = min(tokens, len(self.request.prompt))
        return min(told, self.own_cached_tokens) if self.own_cached_tokens < self.cached_tokens else told

    def enter_replica(self, replica: int, slot: int) -> None:
        """Take a slot. What is cached needs no prefill."""
        self.state = State.PLACED
        self.generated_when_placed = len(self.generated)
        self.replica, self.slot = replica, slot
        self.prefill_length = self.length
        self.num_scheduled_tokens = self.num_computed_tokens = self.cached_tokens

    def leave_replica(self, state: State) -> None:
        """Forget slot, blocks and prefill progress; keep the generated tokens."""
        self.replica = self.slot = -1
        self.blocks = []
        self.further = ()
        self.states = None
        self.duplicate_blocks = []
        self.prefix_lock = None
        self.loading = self.loaded = False
        self.committed_blocks = self.cached_tokens = self.own_cached_tokens = self.capacity = 0
        self.prefill_length = self.num_scheduled_tokens = self.num_computed_tokens = 0
        self.state = state
