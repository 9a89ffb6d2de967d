"""Entry: one request's place in the scheduler. Private to the core; outside there is a RequestId."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from text_generation_router.request import Request, TokenId
from text_generation_router.scheduling.prefix_tree import Node

TOKEN_BYTES = array("I").itemsize


class State(Enum):
    """Where an entry stands.

    WAITING ──► PLACED ──► RUNNING ──► (finished, failed: gone)
       ▲          │           │
       └──────────┴ PREEMPTED ┘   its release is under way; late tokens still count, then it waits again
    PLACED      has a slot and blocks on a replica, which has not heard of it yet
    CANCELLED   its release is under way; late tokens count for nothing, then it is gone

    A replica that is lost sends back all that it held to WAITING, whatever its state was.
    """

    WAITING = auto()
    PLACED = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    CANCELLED = auto()


@dataclass(slots=True, eq=False)
class Entry:
    """A request, what it generated, and what it holds on a replica."""

    request: Request
    arrival: int
    """Order of arrival; the newest entry is the first to be preempted."""
    arrived: float
    """Seconds of the caller's clock."""
    expected: int
    """New tokens it will probably take."""
    work: int = 0
    """Tokens it will probably cost from here: prompt tokens that are not cached, and new tokens."""
    charged: int = 0
    """Tokens its tenant was charged for it."""
    moves: int = 0
    """Replicas it lost while it ran there."""
    moves_in_vain: int = 0
    """Of these, the last ones between which it got no new token."""
    generated_before: int = 0
    """New tokens it had when it was last placed."""
    state: State = State.WAITING
    generated: list[TokenId] = field(default_factory=list)
    replica: int = -1
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    """KV blocks, in order. The first `published` of them are the tree's, but for `duplicates`."""
    published: int = 0
    duplicates: list[int] = field(default_factory=list)
    """Blocks whose content the tree had already from another entry."""
    node: Node | None = None
    """Where its published blocks end in the prefix tree; locked."""
    cached_tokens: int = 0
    """Leading tokens whose KV was there at this admission."""
    prefill_length: int = 0
    """Tokens to prefill under this admission: the prompt, and what was generated before a preemption."""
    ordered: int = 0
    """Of those, how many are cached or were ordered so far."""
    prefilled: int = 0
    """Of those, how many are cached or were reported as computed."""
    released_by: int = 0
    """Number of the orders that release the slot; 0 until those are made."""
    length: int = field(init=False)
    """Tokens known: prompt and generated."""
    longest: int = field(init=False)
    """Positions whose KV may ever be needed: the last new token's is not."""
    capacity: int = 0
    """Positions its blocks hold."""
    prompt_key: bytes = field(init=False)
    """The prompt as the prefix tree reads it."""

    reusable: bytes = b""
    """For `blocks`: the whole blocks of its key, without its last token."""
    beginnings: Sequence[bytes] | None = None
    """For `dispatch`."""

    def __post_init__(self) -> None:
        self.length = len(self.request.prompt)
        self.longest = self.length + self.request.max_new_tokens - 1
        self.prompt_key = array("I", self.request.prompt).tobytes()

    @property
    def key(self) -> bytes:
        """All known tokens as the prefix tree reads them."""
        return self.prompt_key + array("I", self.generated).tobytes() if self.generated else self.prompt_key

    @property
    def salt(self) -> str:
        return self.request.qos.salt

    @property
    def computed(self) -> int:
        """Leading positions whose KV is known to be computed: the token chosen last is not among them."""
        return self.length - 1 if self.prefilled == self.prefill_length else self.prefilled

    @property
    def is_bound(self) -> bool:
        """Whether it has begun to follow a grammar. An engine that schedules for itself does so from the end of the prompt
        on, and no later: there it can go on nowhere but where it runs."""
        return self.request.grammar is not None and bool(self.generated)

    @property
    def unordered(self) -> int:
        """Prompt tokens still to be ordered."""
        return self.prefill_length - self.ordered

    @property
    def work_left(self) -> int:
        """Tokens it will probably still cost on its replica."""
        return self.prefill_length - self.prefilled + max(0, self.expected - len(self.generated))

    def leave_replica(self) -> None:
        """It holds nothing any more; what it generated stays its own."""
        self.replica = self.slot = -1
        self.blocks = []
        self.duplicates = []
        self.node = None
        self.published = self.cached_tokens = self.prefill_length = self.ordered = self.prefilled = 0
        self.released_by = self.capacity = 0
        self.state = State.WAITING
