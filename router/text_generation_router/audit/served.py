"""Served requests with what they got and used: recorded while they run, kept until they are replayed."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import nan

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import LogprobOptions
from text_generation_router.request import Priority, QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.sequence import ScheduledSequence

MAX_KEPT_BYTES = 32 << 20
MAX_TRIES = 8
"""Replays of a request that gave way to clients, after which it is dropped."""
REQUEST_BYTES = 2048
"""Upper estimate of a kept request without its tokens and lists."""
COLD = frozenset({"prefix", "offload"})
"""Replays do without, and all requests if the reuse of prefixes is isolated."""


@dataclass(slots=True)
class Served:
    request: Request
    """Without its prompt once it is kept."""
    prompt: array[int] = field(default_factory=lambda: array("I"))
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """NaN where none was reported."""
    cached_tokens: int = 0
    """Tokens that were found in the prefix cache, in all placements."""
    loads: int = 0
    """Times that some of them were loaded from the host cache."""
    placements: int = 0
    preemptions: int = 0
    losses: int = 0
    """Replicas that it lost."""
    moves: int = 0
    """Times that it lost its replica, or went on at another one."""
    chunks: int = 0
    drafts: int = 0
    """Steps in which tokens were drafted for it."""
    rows: int = 0
    """Sequences in the largest step that gave it a token."""
    replica: int = -1
    slot: int = -1
    version: int = 0
    """That of its adapter."""
    tries: int = 0

    def placed(self, sequence: ScheduledSequence) -> None:
        """Record that it began on a replica, or goes on there."""
        moved = sequence.moves.total > self.losses or self.replica not in (-1, sequence.replica)
        self.moves += moved
        self.preemptions += self.replica >= 0 and not moved
        self.losses, self.placements, self.version = sequence.moves.total, self.placements + 1, sequence.version
        self.replica, self.slot = sequence.replica, sequence.slot
        self.cached_tokens += sequence.cached_tokens
        self.loads += sequence.loaded
        before = sequence.generated[len(self.tokens) :]  # by another scheduler
        self.tokens.extend(before)
        self.logprobs.extend([nan] * len(before))

    def got(self, report: pb.StepReport, start: int, end: int, rows: int) -> None:
        """Record the tokens of a step that gave some to `rows` sequences."""
        self.tokens.extend(report.token_ids[start:end])
        self.logprobs.extend(report.logprobs[start:end] or [nan] * (end - start))
        self.rows = max(self.rows, rows)

    def ended(self) -> None:
        """Make it small, to be kept."""
        self.prompt = array("I", self.request.prompt)
        self.request = replace(self.request, prompt=(), prediction=())

    @property
    def bytes(self) -> int:
        """Upper estimate of its memory."""
        request = self.request
        listed = len(request.sampling.logit_bias_ids) * 2 + len(request.sampling.allowed_token_ids)
        listed += sum(map(len, request.sampling.bad_words)) + len(request.stop_token_ids)
        text = 0 if request.grammar is None else len(request.grammar.text)
        images = sum(len(media.image.data) for media in request.media)
        return REQUEST_BYTES + images + 4 * (len(self.prompt) + 2 * len(self.tokens)) + 4 * text + 64 * listed

    @property
    def features(self) -> frozenset[str]:
        """The features that it used, and its replica."""
        return frozenset(name for name, uses in FEATURES.items() if uses(self)) | {f"replica {self.replica}"}

    @property
    def replay_id(self) -> RequestId:
        """The id of its replay: requests have positive numbers, replays negative ones."""
        return RequestId(-self.request.id)

    def replay(self, most_tokens: int) -> Request:
        """Return the replay of all its tokens, or of all but the last if one more does not fit `most_tokens`."""
        known = self.prompt + self.tokens
        if len(known) >= most_tokens:
            del known[most_tokens - 1 :]
        return replace(
            self.request,
            id=self.replay_id,
            prompt=tuple(known),
            max_new_tokens=1,
            stop_sequences=(),
            logprobs=LogprobOptions(generated=True),
            qos=QualityOfService(self.request.qos.tenant, Priority.BULK),
            trace=None,
            replayed=len(known) - len(self.prompt),
            without=COLD,
        )


FEATURES: Mapping[str, Callable[[Served], object]] = {
    "move": lambda it: it.moves,
    "preemption": lambda it: it.preemptions,
    "adapter": lambda it: it.request.adapter,
    "image": lambda it: it.request.media,
    "grammar": lambda it: it.request.grammar,
    "drafts": lambda it: it.drafts,
    "offload": lambda it: it.loads,
    "prefix": lambda it: it.cached_tokens,
    "chunks": lambda it: it.chunks > it.placements,
    "batch": lambda it: it.rows > 1,
    "decode": lambda it: len(it.tokens) > 1,
}
"""Features that a request may use and its replay does not, or in another form; the rarest first."""


class KeptRequests:
    """Served requests that wait for their replay: by tenant, so that one tenant cannot displace another's, in bounded memory."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._queues: dict[TenantId, deque[Served]] = {}
        """Tenants in the order of their turns."""
        self._bytes = Counter[TenantId]()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def bytes(self) -> int:
        return self._bytes.total()

    def put(self, served: Served) -> int:
        """Keep a request as the last of its tenant. Return the number of those dropped for it: the first of the largest tenants."""
        tenant = served.request.qos.tenant
        self._queues.setdefault(tenant, deque()).append(served)
        self._bytes[tenant] += served.bytes
        before = len(self)
        while self.bytes > self._max_bytes:
            self._take(max(self._bytes, key=self._bytes.__getitem__))
        return before - len(self)

    def take(self) -> Served:
        """Take the first request of the tenant whose turn it is. There must be one."""
        tenant = next(iter(self._queues))
        served = self._take(tenant)
        if tenant in self._queues:
            self._queues[tenant] = self._queues.pop(tenant)
        return served

    def _take(self, tenant: TenantId) -> Served:
        queue = self._queues[tenant]
        served = queue.popleft()
        self._bytes[tenant] -= served.bytes
        if not queue:
            del self._queues[tenant], self._bytes[tenant]
        return served
