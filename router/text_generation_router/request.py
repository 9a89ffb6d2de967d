"""A validated request, and the protocol that delivers its tokens. Nothing below the API checks its values again."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from math import inf
from typing import NamedTuple, NewType, Protocol

from text_generation_proto.values import FinishReason, Grammar, LogprobOptions, Sampling, TraceContext
from text_generation_router.errors import ServingError

RequestId = NewType("RequestId", int)
TenantId = NewType("TenantId", str)
DEFAULT_TENANT = TenantId("")
"""Tenant of requests that name none."""
"""The owner of a request: the digest of an API key, or the value of a header. "" without either."""
TokenId = int

LogprobJson = bytes
"""A log-probability as JSON: the shortest text of its float32, or `null`.

`null` means unknown for a chosen token, and impossible for another one.
Written once for a whole step; a Python float would print the digits of a float64."""


class Priority(IntEnum):
    """Priority classes, the most urgent first. Waiting raises a request's rank: see `scheduling.queue`."""

    SYSTEM = 0
    INTERACTIVE = 1
    DEFAULT = 2
    BULK = 3


@dataclass(frozen=True, slots=True)
class QualityOfService:
    """Tenant, priority and deadlines of a request. Times are seconds of the monotonic clock."""

    tenant: TenantId = DEFAULT_TENANT
    priority: Priority = Priority.DEFAULT
    salt: str = ""
    """Prompts share their KV blocks only with prompts of the same salt."""
    first_token_by: float | None = None
    """The desired time of the first token. It orders the queue; missing it ends nothing."""
    queue_by: float | None = None
    """The request expires at this time if it is still queued."""
    end_by: float | None = None
    """The request expires at this time, queued or running."""
    job: str = ""
    """The session, or the user, of the tenant for which it is made: its requests are charged together. "": not known."""

    def expires(self, *, queued: bool) -> float:
        """Return the time at which a request expires; `queued`: it has not left the queue yet."""
        ends = [self.end_by, self.queue_by if queued else None]
        return min((end for end in ends if end is not None), default=inf)

    @staticmethod
    def late(new_tokens: int, *, queued: bool) -> str:
        """Return the reason of the failure of a request that has expired."""
        return "its time in the queue was over" if queued else f"its time was over after {new_tokens} new tokens"


_IMAGE_KEY = os.urandom(16)
"""The key of `ImageFile.words`, so that a client cannot make two images with equal ones."""
_NO_TOKEN = 1 << 31
"""Above all token ids."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ImageFile:
    """The file of an image: PNG, JPEG, WebP or GIF."""

    digest: bytes
    """Its SHA-256."""
    data: bytes

    @property
    def words(self) -> array[int]:
        """Numbers that stand for the image in the prefix tree, in place of its token ids, which are those of any image."""
        words = array("I", blake2b(self.digest, digest_size=64, key=_IMAGE_KEY).digest())
        return array("I", [word | _NO_TOKEN for word in words])


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a prompt: the `tokens` ids from `offset` on stand for it, marks between its rows included."""

    offset: int
    tokens: int
    image: ImageFile


@dataclass(frozen=True, slots=True)
class Request:
    """One generation for a client, in token ids. Prompt and new tokens fit every limit."""

    id: RequestId
    prompt: Sequence[TokenId]
    """Never changed. An array where it may be long: it takes a ninth of the memory of a tuple, and is copied at once."""
    max_new_tokens: int
    media: tuple[PlacedImage, ...] = ()
    """The images of the prompt, in order."""
    sampling: Sampling = Sampling()
    stop_sequences: tuple[str, ...] = ()
    keep_stop_text: bool = True
    """Keep the stop sequence at the end of the text, as TGI does; OpenAI cuts it."""
    visible_special: frozenset[TokenId] = frozenset()
    """Special tokens whose text is part of the answer, such as `[TOOL_CALLS]`."""
    stop_token_ids: frozenset[TokenId] = frozenset()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    """Number of new tokens before an end-of-sequence or stop token may be chosen."""
    logprobs: LogprobOptions = LogprobOptions()
    grammar: Grammar | None = None
    adapter: str = ""
    """LoRA adapter to compute it with; "": the model alone."""
    qos: QualityOfService = QualityOfService()
    tokenized: tuple[float, float] = (0.0, 0.0)
    """Times at which the tokenizing of the prompt began and ended, in seconds of the monotonic clock."""
    trace: TraceContext | None = None
    """For the spans of the shard."""
    turn_ends: tuple[int, ...] = ()
    """Tokens of the prompt that the next turn can repeat, for each way in which it can go on; (): not known."""
    prediction: Sequence[TokenId] = ()
    """The text that the client expects, for drafts; see NewSequence.prediction in shard.proto."""
    replayed: int = 0
    """Tokens at the end of the prompt that were served before and are to be scored: a replay; 0 for a client's request."""
    without: Set[str] = frozenset()
    """Features that it does without: "prefix", and with it "offload"; "offload"; "drafts"."""

    def has_image_around(self, position: int) -> bool:
        """Return True if an image has tokens before and from `position` on."""
        return any(each.offset < position < each.offset + each.tokens for each in self.media)


class Moves(NamedTuple):
    """The losses of a replica, or of the whole scheduler, while a request ran there."""

    total: int = 0
    fruitless: int = 0
    """Consecutive losses without a new token in between."""

    def after_loss(self, *, advanced: bool) -> Moves:
        """Return the count after one more; `advanced`: the request has got a token since it was placed."""
        # A request that never gets a token may be what makes shards fail.
        return Moves(self.total + 1, 1 if advanced else self.fruitless + 1)

    @property
    def is_suspect(self) -> bool:
        """True if the request may be the cause of these losses. One of two such requests waits for the other's token."""
        return self.fruitless > 1


NO_MOVES = Moves()


class RequestProgress(NamedTuple):
    """The state of a request that another scheduler had accepted before it was lost."""

    generated: Sequence[TokenId] = ()
    moves: Moves = NO_MOVES
    """NO_MOVES if it has only waited."""


TopToken = tuple[TokenId, LogprobJson]


class TokenListener(Protocol):
    """A receiver of one request's tokens, in order. Called on the event loop; must neither block nor raise.

    The last call is `on_token` with a reason, or `on_failure`.
    """

    def on_token(
        self, token_id: TokenId, logprob: LogprobJson, top: Sequence[TopToken], reason: FinishReason | None
    ) -> bool:
        """Take one new token; the last one has a `reason`. Return False to end the request."""

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Iterable[Sequence[TopToken]]) -> None:
        """Take the log-probabilities of the prompt's tokens, before the first new token; `tops` only if requested.

        tops[i] are the most probable tokens at prompt position i, best first; tops[0] is empty.
        """

    def on_scheduled(self, cached_tokens: int, replica: int) -> None:
        """The request left the queue with `cached_tokens` cached prompt tokens; again after a preemption or a move."""

    def on_lost(self) -> None:
        """The replica that computed the request was lost; the request waits for another one."""

    def on_cached_tokens(self, cached_tokens: int) -> None:
        """A self-scheduling engine found these prompt tokens in its own prefix cache; the last call counts."""

    def on_predicted(self, drafted: int, accepted: int) -> None:
        """So many more tokens were drafted from the prediction, and accepted of them."""

    def on_failure(self, error: ServingError) -> None:
        """The request ended with an error."""
