"""Served requests with what they got and used: recorded while they run, kept until they are replayed."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
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
FEATURES = (
    *("move", "preemption", "adapter", "image", "grammar"),
    *("drafts", "offload", "prefix", "chunks", "batch", "decode"),
)
"""Features that a request may use and its replay does not, or in another form; the rarest first."""
OPTIONAL = frozenset({"drafts", "offload", "prefix"})
"""The features that requests can do without."""


@dataclass(slots=True)
class Served:
    request: Request
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """NaN where none was reported."""
    counts: Counter[str] = field(default_factory=Counter)
    """Amounts of the features that are counted as they are used. `used` adds those that follow from request and tokens."""
    losses: int = 0
    """Replicas that it lost."""
    replica: int = -1
    slot: int = -1
    version: int = 0
    """That of its adapter."""
    tries: int = 0

    def placed(self, sequence: ScheduledSequence) -> None:
        """Record that it began on a replica, or goes on there."""
        moved = sequence.moves.total > self.losses or self.replica not in (-1, sequence.replica)
        if moved or self.replica >= 0:
            self.counts["move" if moved else "preemption"] += 1
        self.counts["prefix"] += sequence.cached_tokens
        self.counts["offload"] += sequence.loaded
        self.counts["chunks"] -= 1  # the first chunk of a placement does not count
        self.losses, self.version = sequence.moves.total, sequence.version
        self.replica, self.slot = sequence.replica, sequence.slot
        self._add(sequence.generated[len(self.tokens) :])  # those of another scheduler

    def got(self, report: pb.StepReport, start: int, end: int, rows: int) -> None:
        """Record the tokens of a step that gave some to `rows` sequences."""
        self._add(report.token_ids[start:end], report.logprobs[start:end])
        self.counts["batch"] = max(self.counts["batch"], rows - 1)

    def _add(self, tokens: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs or [nan] * len(tokens))

    @property
    def used(self) -> Mapping[str, int]:
        """The features that it used: how often, or how many tokens, chunks, images or other sequences."""
        adapter, image, grammar = self.request.adapter != "", len(self.request.media), self.request.grammar is not None
        told = Counter(adapter=adapter, image=image, grammar=grammar, decode=len(self.tokens) - 1)
        known = self.counts + told  # without those that are 0 or less
        return {name: int(known[name]) for name in FEATURES if name in known}

    @property
    def features(self) -> frozenset[str]:
        """The features that it used, and its replica."""
        return frozenset({*self.used, f"replica {self.replica}"})

    @property
    def bytes(self) -> int:
        """Upper estimate of its memory."""
        request = self.request
        listed = len(request.sampling.logit_bias_ids) * 2 + len(request.sampling.allowed_token_ids)
        listed += sum(map(len, request.sampling.bad_words)) + len(request.stop_token_ids)
        text = 0 if request.grammar is None else len(request.grammar.text)
        images = sum(len(media.image.data) for media in request.media)
        return REQUEST_BYTES + images + 4 * (len(request.prompt) + 2 * len(self.tokens)) + 4 * text + 64 * listed

    def replay(self, most_tokens: int) -> Request:
        """Return the replay of all its tokens, or of those before `most_tokens`, among which is one more."""
        known = array("I", self.request.prompt)
        known.extend(self.tokens)
        del known[most_tokens - 1 :]
        return replace(
            self.request,
            id=RequestId(-self.request.id),  # that of no request
            prompt=known,
            max_new_tokens=1,
            stop_sequences=(),
            logprobs=LogprobOptions(generated=True),
            qos=QualityOfService(self.request.qos.tenant, Priority.BULK),
            trace=None,
            replayed=len(known) - len(self.request.prompt),
            without=frozenset({"prefix"}),
        )


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
            self.take(max(self._bytes, key=self._bytes.__getitem__))
        return before - len(self)

    def take(self, tenant: TenantId | None = None) -> Served:
        """Take the first request of a tenant, by default of the one whose turn it is. There must be one."""
        if turn := tenant is None:
            tenant = next(iter(self._queues))
        queue = self._queues[tenant]
        served = queue.popleft()
        self._bytes[tenant] -= served.bytes
        if not queue:
            del self._queues[tenant], self._bytes[tenant]
        elif turn:
            self._queues[tenant] = self._queues.pop(tenant)
        return served
